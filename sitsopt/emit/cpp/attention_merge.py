"""C++ text: a run of tiles of one segment, and the joining of partial softmax results."""

from __future__ import annotations

QUERY_TEXT = r"""
#if defined(DOT2)
#define OUT_LANE lane_of_zip
#else
#define OUT_LANE lane_of
#endif
static void load_queries(const SitsAttention* a, const Segment& at, float* q) {
    int64_t group = group_of(a);
    for (int64_t t = at.first; t < at.first + at.rows; t++)
        for (int64_t g = 0; g < group; g++, q += QP) {
            const elem* from = (const elem*)a->q + at.b * a->q_stride[0] +
                               (at.h * group + g) * a->q_stride[1] + t * a->q_stride[2];
#if defined(DOT2)
            q[QP - 1] = 0.0f;  // the last pair may be half a pair
            memcpy(q, from, HD * sizeof(elem));
#else
            for (int i = 0; i < QP; i++) q[i] = i < HD ? widen(from[i]) : 0.0f;
#endif
        }
}

// What is added to the n scores from key `from` on in row t of `head`; -inf past the end of the cache.
static void fill_bias(const SitsAttention* a, int64_t b, int64_t head, int64_t t, int64_t from, int n,
                      float* bias) {
    const int64_t* ms = a->mask_stride;
    int64_t at = b * ms[0] + head * ms[1] + t * ms[2] + from * ms[3];
    if (a->mask_kind == 0) {
        for (int j = 0; j < TILE; j++) bias[j] = 0.0f;
    } else if (a->mask_kind == 1 && ms[3] == 1 && n == TILE) {
        const uint8_t* p = (const uint8_t*)a->mask + at;
        for (int j = 0; j < TILE; j++) bias[j] = p[j] ? 0.0f : -INFINITY;
    } else if (a->mask_kind == 2 && ms[3] == 1) {
        memcpy(bias, (const float*)a->mask + at, 4 * n);
    } else {
        for (int j = 0; j < n; j++) bias[j] = mask_value(a, at + j * ms[3]);
    }
    if (a->causal)
        for (int j = 0; j < n; j++)
            if (from + j > t) bias[j] = -INFINITY;
    for (int j = n; j < TILE; j++) bias[j] = -INFINITY;
}

typedef void (*ScoreFn)(const float*, const elem*, const elem*, int64_t, int, float*);
typedef void (*MixFn)(const float*, const elem*, const elem*, int64_t, int, const float*, float*);
static const ScoreFn SCORE[QROWS] = {score<1>, score<2>, score<3>, score<4>,
                                     score<5>, score<6>, score<7>, score<8>};
static const MixFn MIX[VROWS] = {mix_all<1>, mix_all<2>, mix_all<3>, mix_all<4>, mix_all<5>, mix_all<6>};

// Equal blocks of at most `most` rows.
INLINE int64_t even_block(int64_t rows, int64_t most) {
    int64_t blocks = (rows + most - 1) / most;
    return (rows + blocks - 1) / blocks;
}

"""

SWEEP_TEXT = r"""
// Runs `count` tiles of a segment; leaves accumulators, m and l in `part`.
static void sweep(const SitsAttention* a, const Segment& at, const int32_t* tiles, int64_t count,
                  float* mine, float* part) {
    int64_t group = group_of(a), rows = at.rows * group;
    int64_t keys = a->keys, ks = a->k_stride[2], vs = a->v_stride[2];
    const elem* k = (const elem*)a->k + at.b * a->k_stride[0] + at.h * a->k_stride[1];
    const elem* v = (const elem*)a->v + at.b * a->v_stride[0] + at.h * a->v_stride[1];
    float *q = mine, *scores = q + up(rows * QP), *bias = scores + rows * TILE;
    float *alpha = bias + rows * TILE, *o = part, *m = o + up(rows * VP), *l = m + up(rows);
    bool by_head = a->mask_kind && a->mask_stride[1];
    int64_t qblock = even_block(rows, QROWS), vblock = even_block(rows, VROWS);
    load_queries(a, at, q);
    memset(o, 0, rows * VP * sizeof(float));
    for (int64_t r = 0; r < rows; r++) { m[r] = -INFINITY; l[r] = 0.0f; }
    for (int64_t i = 0; i < count; i++) {
        int64_t from = (int64_t)tiles[i] * TILE;
        int n = (int)(keys - from < TILE ? keys - from : TILE);
        const elem *next_k = i + 1 < count ? k + (int64_t)tiles[i + 1] * TILE * ks : nullptr;
        const elem *next_v = i + 1 < count ? v + (int64_t)tiles[i + 1] * TILE * vs : nullptr;
        for (int64_t r = 0; r < rows; r += qblock) {
            int64_t size = rows - r < qblock ? rows - r : qblock;
            SCORE[size - 1](q + r * QP, k + from * ks, r ? nullptr : next_k, ks, n, scores + r * TILE);
        }
        bool biased = a->mask_kind || n < TILE || (a->causal && from + n > at.first + 1);
        for (int64_t r = 0; r < rows; r++) {
            float* add = bias + (by_head ? r : r / group) * TILE;
            if (biased && (by_head || r % group == 0))
                fill_bias(a, at.b, at.h * group + r % group, at.first + r / group, from, n, add);
            alpha[r] = soften(scores + r * TILE, biased ? add : nullptr, a->scale, a->softcap, m[r], l[r]);
        }
        for (int64_t r = 0; r < rows; r += vblock) {
            int64_t size = rows - r < vblock ? rows - r : vblock;
            MIX[size - 1](scores + r * TILE, v + from * vs, r ? nullptr : next_v, vs, n, alpha + r, o + r * VP);
        }
    }
}
"""

FINISH_TEXT = r"""
// Accumulators lie chunk by chunk in the order of load_values; the output is in the order of dims.
INLINE void write_row(const vf* x, elem* out) {
    float flat[VP];
    for (int c = 0; c < VP / CHUNK; c++)
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < W; i++) flat[c * CHUNK + OUT_LANE(half, i)] = x[2 * c + half][i];
    for (int i = 0; i < VD; i++) out[i] = narrow(flat[i]);
}

// Writes a segment from its n partial results; returns whether some row saw nothing above LOW.
static bool finish(const SitsAttention* a, const Segment& at, float* const* parts, int n) {
    int64_t group = group_of(a), rows = at.rows * group;
    bool lost = false;
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = at.h * group + r % group;
        float peak = a->sinks ? a->sinks[head] : -INFINITY;
        for (int i = 0; i < n; i++) {
            float m = parts[i][up(rows * VP) + r];
            peak = m > peak ? m : peak;
        }
        float base = peak == -INFINITY ? 0.0f : peak;
        float total = a->sinks ? exp1(a->sinks[head] - base) : 0.0f;
        vf x[VP / W] = {};
        for (int i = 0; i < n; i++) {
            const float *o = parts[i] + r * VP, *m = parts[i] + up(rows * VP);
            float share = n == 1 && m[r] == base ? 1.0f : exp1(m[r] - base);
            total += m[up(rows) + r] * share;
            for (int j = 0; j < VP / W; j++) x[j] = fma(loadf(o + j * W), splat(share), x[j]);
        }
        AFTER_ROW(a, at, r, base, total);
        for (int j = 0; j < VP / W; j++) x[j] = x[j] / splat(total == 0.0f && a->safe ? 1.0f : total);
        write_row(x, (elem*)a->out + at.b * a->out_stride[0] + head * a->out_stride[1] +
                         (at.first + r / group) * a->out_stride[2]);
        lost |= peak <= LOW;
    }
    return lost;
}
"""
