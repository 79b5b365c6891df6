"""C++ text: attention over a quantized cache of keys and values.

The same work as attention over a plain cache (`attention.py`); only where a tile comes from differs. Recent tiles lie
in the ring and hot ones in the pool, as they are; a packed tile is unpacked into a thread's own room, which the
first-level cache holds, and is never written to memory. What each tile got of the attention is noted on the way.
"""

from __future__ import annotations

from ..kernel import KvAttention
from .attention import RUN_TEXT, header
from .attention_dots import DOTS_TEXT
from .attention_int4 import INT4_TEXT
from .attention_merge import FINISH_TEXT, QUERY_TEXT
from .attention_plan import PLAN_TEXT
from .attention_tile import TILE_TEXT
from .attention_unpack import UNPACK_TEXT

PARTS = (
    "meta", "ring_k", "ring_v", "sink_k", "sink_v", "pool_k", "pool_v", "hot", "mass", "seen", "k", "k_scale", "k_low",
    "v", "v_scale", "v_low",
)  # fmt: skip
META_START = 2  # the word of `meta` that says where a sequence begins: `graph/kv/state.py`

BATCH = 4  # packed tiles that share a softmax step

_TILES = r"""
// A part of the cache of row b, by its place in PARTS.
#define PART(kv, b, i, T) ((T*)((kv)->state + (b) * (kv)->row_bytes + (kv)->at[i]))

struct Tokens { const elem *k, *v; };

// The sequence's first tokens lie beside the tiles, in full.
static void put_sinks(const SitsKv* kv, int64_t b, int64_t h, int64_t from, elem* k, elem* v) {
    int64_t start = PART(kv, b, 0, int64_t)[META_START];
    for (int64_t i = 0; i < kv->sinks; i++) {
        int64_t j = start + i - from;
        if (j < 0 || j >= TILE) continue;
        memcpy(k + j * HD, PART(kv, b, 3, elem) + (h * kv->sinks + i) * HD, HD * sizeof(elem));
        memcpy(v + j * VD, PART(kv, b, 4, elem) + (h * kv->sinks + i) * VD, VD * sizeof(elem));
    }
}

// The keys and values of a tile, where they lie or unpacked into `mine`; zeros where there is no token.
static Tokens tile_of(const SitsKv* kv, int64_t b, int64_t h, int64_t tile, elem* mine) {
    elem *k = mine, *v = mine + TILE * HD;
    int64_t from = tile * TILE;
    if (tile >= kv->committed) {
        int64_t place = h * kv->ring + from % kv->ring, n = kv->total - from;
        const elem *rk = PART(kv, b, 1, elem) + place * HD, *rv = PART(kv, b, 2, elem) + place * VD;
        if (n >= TILE) return {rk, rv};
        memset(mine, 0, TILE * (HD + VD) * sizeof(elem));
        if (n > 0) { memcpy(k, rk, n * HD * sizeof(elem)); memcpy(v, rv, n * VD * sizeof(elem)); }
        return {k, v};
    }
    int64_t start = PART(kv, b, 0, int64_t)[META_START], slot = 0;
    bool has_sinks = start < from + TILE && start + kv->sinks > from;
    if (kv->pool) slot = PART(kv, b, 7, int16_t)[h * kv->old + tile];
    if (slot) {
        const elem* pk = PART(kv, b, 5, elem) + (slot - 1) * TILE * HD;
        return {pk, PART(kv, b, 6, elem) + (slot - 1) * TILE * VD};
    }
    int64_t at = h * kv->old + tile;
    unpack_keys(PART(kv, b, 10, uint8_t) + at * TILE * KB, PART(kv, b, 11, uint16_t) + at * HD,
                PART(kv, b, 12, uint16_t) + at * HD, k);
    unpack_values(PART(kv, b, 13, uint8_t) + at * TILE * VB, PART(kv, b, 14, uint16_t) + at * TILE,
                  PART(kv, b, 15, uint16_t) + at * TILE, v);
    if (has_sinks) put_sinks(kv, b, h, from, k, v);
    return {k, v};
}

// A packed tile's bytes, or a plain one's, on their way into the second-level cache.
static void fetch_tile(const SitsKv* kv, int64_t b, int64_t h, int64_t tile) {
    if (tile >= kv->committed) return;
    int64_t at = h * kv->old + tile;
    const uint8_t *k = PART(kv, b, 10, uint8_t) + at * TILE * KB, *v = PART(kv, b, 13, uint8_t) + at * TILE * VB;
    for (int64_t i = 0; i < TILE * KB; i += 64) fetch(k + i);
    for (int64_t i = 0; i < TILE * VB; i += 64) fetch(v + i);
    for (int64_t i = 0; i < HD; i += 32) {
        fetch(PART(kv, b, 11, uint16_t) + at * HD + i);
        fetch(PART(kv, b, 12, uint16_t) + at * HD + i);
    }
}

// The weight, relative to the row's peak, that went to the sinks of a tile.
static float sink_weight(const SitsKv* kv, int64_t b, int64_t from, const float* s, const float* bias, float peak) {
    int64_t start = PART(kv, b, 0, int64_t)[META_START];
    float lost = 0.0f, cap = kv->a.softcap;
    for (int64_t i = 0; i < kv->sinks; i++) {
        int64_t j = start + i - from;
        if (j < 0 || j >= TILE) continue;
        float x = s[j] * kv->a.scale;
        if (cap != 0.0f) x = tanh(splat(x / cap))[0] * cap;
        lost += exp1(x + (bias ? bias[j] : 0.0f) - peak);
    }
    return lost;
}

// How much attention row r of a segment gave a tile, relative to its peak.
INLINE void note_tile(const SitsKv* kv, int64_t seg, int64_t tile, int64_t rows, int64_t r, float peak, float got) {
    kv->peak[(seg * kv->tiles + tile) * rows + r] = peak == -INFINITY ? 0.0f : peak;
    kv->part[(seg * kv->tiles + tile) * rows + r] = got > 0.0f ? got : 0.0f;
}

INLINE bool holds_sinks(const SitsKv* kv, int64_t start, int64_t from) {
    return kv->sinks && start < from + TILE && start + kv->sinks > from;
}

"""

_SWEEP = r"""
// Runs `count` tiles of a segment; leaves accumulators, m and l in `part`.
static void sweep(const SitsAttention* a, const Segment& at, const int32_t* tiles, int64_t count,
                  float* mine, float* part) {
    const SitsKv* kv = (const SitsKv*)a;
    int64_t group = group_of(a), rows = at.rows * group;
    float* own = mine + tile_room(rows) - EXTRA_ROOM;
    elem* unpacked = (elem*)own;
    float *q = mine, *scores = q + up(rows * QP), *bias = scores + rows * TILE;
    float *alpha = bias + rows * TILE, *o = part, *m = o + up(rows * VP), *l = m + up(rows);
    bool by_head = a->mask_kind && a->mask_stride[1];
    int64_t qblock = even_block(rows, QROWS), vblock = even_block(rows, VROWS);
    load_queries(a, at, q);
    memset(o, 0, rows * VP * sizeof(float));
    for (int64_t r = 0; r < rows; r++) { m[r] = -INFINITY; l[r] = 0.0f; }
#if defined(DOTS)
    Dots dots = start_dots(a, at, own + TILE * (HD + VD), o, m, l, alpha);
#endif
    int64_t start = PART(kv, at.b, 0, int64_t)[META_START], seg = at.b * a->kv_heads + at.h;
    for (int64_t i = 0; i < count; i++) {
#if defined(DOTS)
        int taken = dots.rows ? step_dots(a, at, dots, tiles + i, count - i, start) : 0;
        if (taken) { i += taken - 1; continue; }
#endif
        int64_t from = (int64_t)tiles[i] * TILE;
        int n = (int)(a->keys - from < TILE ? a->keys - from : TILE);
        bool has_sinks = holds_sinks(kv, start, from);
        if (i + 1 < count) fetch_tile(kv, at.b, at.h, tiles[i + 1]);
        Tokens x = tile_of(kv, at.b, at.h, tiles[i], unpacked);
        for (int64_t r = 0; r < rows; r += qblock) {
            int64_t size = rows - r < qblock ? rows - r : qblock;
            SCORE[size - 1](q + r * QP, x.k, nullptr, HD, n, scores + r * TILE);
        }
        for (int64_t r = 0; r < rows; r++) {
            float *add = bias + (by_head ? r : r / group) * TILE, *s = scores + r * TILE, raw[TILE], before = l[r];
            if (by_head || r % group == 0)
                fill_bias(a, at.b, at.h * group + r % group, at.first + r / group, from, n, add);
            if (kv->rate && has_sinks) memcpy(raw, s, sizeof raw);
            alpha[r] = soften(s, add, a->scale, a->softcap, m[r], l[r]);
            if (!kv->rate) continue;
            float got = l[r] - before * alpha[r];
            if (has_sinks) got -= sink_weight(kv, at.b, from, raw, add, m[r] == -INFINITY ? 0.0f : m[r]);
            note_tile(kv, seg, tiles[i], rows, r, m[r], got);
        }
#if defined(DOTS)
        plain_step(dots);
#endif
        for (int64_t r = 0; r < rows; r += vblock) {
            int64_t size = rows - r < vblock ? rows - r : vblock;
            MIX[size - 1](scores + r * TILE, x.v, nullptr, VD, n, alpha + r, o + r * VP);
        }
    }
#if defined(DOTS)
    end_dots(dots);
#endif
}
"""

_RATE = r"""
static void note_row(const SitsAttention* a, const Segment& at, int64_t r, float base, float total) {
    const SitsKv* kv = (const SitsKv*)a;
    int64_t place = (at.b * a->kv_heads + at.h) * a->rows * group_of(a) + r;
    kv->base[place] = base;
    kv->sum[place] = total;
}

// Whether a query position may attend some key of a tile, by any head.
static bool sees(const SitsAttention* a, int64_t b, int64_t t, int64_t from, int n) {
    const int64_t* ms = a->mask_stride;
    for (int64_t h = 0; h < (ms[1] ? a->heads : 1); h++)
        if (openness(a, b * ms[0] + h * ms[1] + t * ms[2] + from * ms[3], n) == 2) return true;
    return false;
}

// The first key that the last query may attend.
static int64_t first_key(const SitsAttention* a, int64_t b) {
    for (int64_t tile = 0; tile * TILE < a->keys; tile++) {
        int n = (int)(a->keys - tile * TILE < TILE ? a->keys - tile * TILE : TILE);
        if (!sees(a, b, a->rows - 1, tile * TILE, n)) continue;
        for (int j = 0; j < n; j++)
            if (sees(a, b, a->rows - 1, tile * TILE + j, 1)) return tile * TILE + j;
    }
    return 0;
}

static void add_up(SitsKv* kv) {
    SitsAttention* a = &kv->a;
    int64_t rows = a->rows * group_of(a);
    for (int64_t b = 0; b < a->batch; b++) {
        float *mass = PART(kv, b, 8, float), *seen = PART(kv, b, 9, float);
        for (int64_t tile = 0; tile < kv->tiles; tile++) {
            int n = (int)(a->keys - tile * TILE < TILE ? a->keys - tile * TILE : TILE);
            for (int64_t t = 0; t < a->rows; t++) seen[tile] += sees(a, b, t, tile * TILE, n) ? 1.0f : 0.0f;
        }
        for (int64_t h = 0; h < a->kv_heads; h++) {
            int64_t seg = b * a->kv_heads + h;
            for (int64_t tile = 0; tile < kv->tiles; tile++) {
                const float *peak = kv->peak + (seg * kv->tiles + tile) * rows, *part = kv->part + (seg * kv->tiles + tile) * rows;
                float got = 0.0f;
                for (int64_t r = 0; r < rows; r++)
                    if (part[r] > 0.0f) got += part[r] * exp1(peak[r] - kv->base[seg * rows + r]) / kv->sum[seg * rows + r];
                mass[h * kv->tiles + tile] += got;
            }
        }
    }
}

static void start_step(SitsKv* kv) {
    SitsAttention* a = &kv->a;
    if (kv->committed == 0 && (kv->sinks || kv->rate))
        for (int64_t b = 0; b < a->batch; b++) PART(kv, b, 0, int64_t)[META_START] = first_key(a, b);
    int64_t size = a->batch * a->kv_heads * kv->tiles * a->rows * group_of(a);
    if (kv->rate) memset(kv->part, 0, size * sizeof(float));
}

extern "C" int KV_SYMBOL(SitsKv* kv) {
    start_step(kv);
    if (SYMBOL(&kv->a)) return 1;
    if (kv->rate) add_up(kv);
    return 0;
}

// For a caller with a team of its own, as over a plain cache; one member closes always.
extern "C" void* KV_OPEN(SitsKv* kv, int64_t team) {
    start_step(kv);
    return OPEN_SYMBOL(&kv->a, team);
}
extern "C" void KV_CLOSE(SitsKv* kv, void* opened) {
    CLOSE_SYMBOL(&kv->a, opened);
    if (kv->rate) add_up(kv);
}
"""


def text(kernel: KvAttention) -> str:
    """The translation unit after vectors, elements and structs."""
    sizes = (
        f"#define ROUNDED {int(kernel.dtype != 'f32')}\n#define MOST_ROWS 64\n#define BATCH {BATCH}\n#define BITS {kernel.bits}\n#define META_START {META_START}\n"
        "#define AFTER_ROW(a, at, r, base, total) if (((const SitsKv*)a)->rate) note_row(a, at, r, base, total)\n"
        f"#define KV_SYMBOL {kernel.symbol}\n#define KV_OPEN {kernel.symbol}_open\n"
        f"#define KV_CLOSE {kernel.symbol}_close\n"
        "struct Segment;\n"
        "static void note_row(const SitsAttention*, const Segment&, int64_t, float, float);\n"
    )
    room = f"(({kernel.head_dim} + {kernel.value_dim}) * 64 + MOST_ROWS * ({kernel.head_dim} + 132 + 64 * BATCH) + 64 * BATCH + 16)"
    return (
        sizes + header(kernel.head_dim, kernel.value_dim, f"{kernel.symbol}_all", room) + PLAN_TEXT + TILE_TEXT
        + UNPACK_TEXT + QUERY_TEXT + INT4_TEXT + _TILES + DOTS_TEXT + _SWEEP + FINISH_TEXT + RUN_TEXT + _RATE
    )  # fmt: skip
