"""C++ text: steps of a sweep over tiles that are read as bytes, a few tiles a softmax step."""

from __future__ import annotations

DOTS_TEXT = r"""
#if defined(DOTS)
// What a sweep keeps beside its accumulators for tiles that are read as bytes. Two sums run side by side, and each is
// behind by a factor where the other was added to last.
struct Dots {
    int64_t rows;  // 0: too many for the room there is
    float *q, *o4, *lows, *owed, *owed4, *wide, *bias;
    float *o, *m, *l, *alpha;  // the sweep's
    bool mixed;
};

static Dots start_dots(const SitsAttention* a, const Segment& at, float* room, float* o, float* m, float* l, float* alpha) {
    int64_t group = group_of(a), rows = at.rows * group;
    if (rows > MOST_ROWS) return {};
    Dots d{rows, room, room + MOST_ROWS * HD};
    d.lows = d.o4 + MOST_ROWS * 128, d.owed = d.lows + MOST_ROWS, d.owed4 = d.owed + MOST_ROWS;
    d.wide = d.owed4 + MOST_ROWS, d.bias = d.wide + MOST_ROWS * LONG;
    d.o = o, d.m = m, d.l = l, d.alpha = alpha;
    float* q = d.q;
    for (int64_t t = at.first; t < at.first + at.rows; t++)
        for (int64_t g = 0; g < group; g++, q += HD) {
            const elem* from = (const elem*)a->q + at.b * a->q_stride[0] + (at.h * group + g) * a->q_stride[1] + t * a->q_stride[2];
            for (int i = 0; i < HD; i++) q[i] = widen(from[i]);
        }
    memset(d.o4, 0, rows * 128 * sizeof(float));
    for (int64_t r = 0; r < rows; r++) { d.lows[r] = 0.0f; d.owed[r] = d.owed4[r] = 1.0f; }
    return d;
}

// How many of the next tiles are packed and without sinks, at most BATCH.
static int as_bytes(const SitsKv* kv, const Segment& at, const int32_t* tiles, int64_t count, int64_t start) {
    int found = 0;
    for (; found < BATCH && found < count; found++) {
        int64_t tile = tiles[found];
        if (tile >= kv->committed || (tile + 1) * TILE > kv->a.keys || holds_sinks(kv, start, tile * TILE)) break;
        if (kv->pool && PART(kv, at.b, 7, int16_t)[at.h * kv->old + tile]) break;
    }
    return found;
}

// The masks of some tiles, for one query position of a head; null where a tile is open.
static void biases(const SitsAttention* a, const Segment& at, int64_t r, const int32_t* tiles, int count, float* room, const float** out) {
    int64_t head = at.h * group_of(a) + r % group_of(a), t = at.first + r / group_of(a);
    const int64_t* ms = a->mask_stride;
    for (int i = 0; i < count; i++) {
        int64_t from = (int64_t)tiles[i] * TILE;
        if (a->mask_kind == 1 && ms[3] == 1 && !a->causal) {
            vb x = _mm512_loadu_si512((const uint8_t*)a->mask + at.b * ms[0] + head * ms[1] + t * ms[2] + from);
            if (_mm512_test_epi8_mask(x, x) == ~0ull) { out[i] = nullptr; continue; }
        }
        fill_bias(a, at.b, head, t, from, TILE, room + i * TILE);
        out[i] = room + i * TILE;
    }
}

// Takes the next few tiles, if they are packed; returns how many.
static int step_dots(const SitsAttention* a, const Segment& at, Dots& d, const int32_t* tiles, int64_t count, int64_t start) {
    const SitsKv* kv = (const SitsKv*)a;
    int taken = as_bytes(kv, at, tiles, count, start);
    int64_t group = group_of(a), seg = at.b * a->kv_heads + at.h;
    Packed4 v[BATCH];
    for (int i = 0; i < taken; i++) {
        int64_t place = at.h * kv->old + tiles[i], next = -1;
        if (taken + i < count && tiles[taken + i] < kv->committed) next = at.h * kv->old + tiles[taken + i];
        const uint8_t *k = PART(kv, at.b, 10, uint8_t), *values = PART(kv, at.b, 13, uint8_t);
        const uint16_t *ks = PART(kv, at.b, 11, uint16_t), *kl = PART(kv, at.b, 12, uint16_t);
        const uint16_t *vs = PART(kv, at.b, 14, uint16_t), *vl = PART(kv, at.b, 15, uint16_t);
        v[i] = {values + place * TILE * VB, vs + place * TILE, vl + place * TILE, next < 0 ? nullptr : values + next * TILE * VB};
        if (next >= 0) fetch(vs + next * TILE), fetch(vs + next * TILE + 32), fetch(vl + next * TILE), fetch(vl + next * TILE + 32);
        for (int64_t j = 0; next >= 0 && j < HD; j += 32) fetch(ks + next * HD + j), fetch(kl + next * HD + j);
        for (int64_t r = 0; r < d.rows; r += ROWS4)
            SCORE4[(d.rows - r < ROWS4 ? d.rows - r : ROWS4) - 1](
                d.q + r * HD, ks + place * HD, kl + place * HD, k + place * TILE * KB,
                r || next < 0 ? nullptr : k + next * TILE * KB, d.wide + r * LONG + i * TILE);
    }
    const float* bias[BATCH];
    float sums[BATCH];
    for (int64_t r = 0; taken && r < d.rows; r++) {
        if ((a->mask_kind && a->mask_stride[1]) || r % group == 0) biases(a, at, r, tiles, taken, d.bias, bias);
        d.alpha[r] = soften4(d.wide + r * LONG, taken, bias, a->scale, a->softcap, d.m[r], d.l[r], sums);
        for (int i = 0; kv->rate && i < taken; i++) note_tile(kv, seg, tiles[i], d.rows, r, d.m[r], sums[i]);
        d.owed[r] *= d.alpha[r], d.alpha[r] *= d.owed4[r], d.owed4[r] = 1.0f;
    }
    for (int64_t r = 0; taken && r < d.rows; r += ROWS4)
        MIX4[(d.rows - r < ROWS4 ? d.rows - r : ROWS4) - 1](d.wide + r * LONG, v, taken, d.alpha + r, d.o4 + r * 128, d.lows + r);
    d.mixed |= taken > 0;
    return taken;
}

// Before the sweep adds a tile to its own sum.
static void plain_step(Dots& d) {
    for (int64_t r = 0; r < d.rows; r++) d.owed4[r] *= d.alpha[r], d.alpha[r] *= d.owed[r], d.owed[r] = 1.0f;
}

// One sum of the two.
static void end_dots(Dots& d) {
    for (int64_t r = 0; d.mixed && r < d.rows; r++) {
        for (int64_t j = 0; j < VP; j++) d.o[r * VP + j] *= d.owed[r];
        for (int64_t j = 0; j < 128; j++) d.o4[r * 128 + j] *= d.owed4[r];
        add_mixed(d.o4 + r * 128, d.lows[r] * d.owed4[r], d.o + r * VP);
    }
}
#endif
"""
