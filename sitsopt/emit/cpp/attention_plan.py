"""C++ text: what an attention call has to read: its segments, and for each the key tiles that are open to it.

A segment is one (batch, kv head, block of query rows). With few query rows there is one block, so that K
and V are read once; with many, a block is small enough for the second-level cache, and a causal mask closes
to it the tiles that lie in its future.
"""

from __future__ import annotations

PLAN_TEXT = r"""
// Scores of rows that see nothing above this are decided elsewhere: see `rescue`.
#define LOW -1e30f

struct Plan {  // of the calling thread; its buffers only grow
    int64_t block, blocks;           // query positions a segment, segments a (batch, kv head)
    int64_t segments, tiles;
    int64_t lists, b_lists, h_lists, t_lists;  // open tiles are listed once for all that share a mask
    int32_t* tile;                   // [lists][tiles] open tiles
    int64_t* open;                   // [lists] how many
    char* low;                       // [lists] a closed tile had finite, very low mask values
    int64_t* start;                  // [segments + 1] running count of open tiles
    char* lost;                      // [segments] some row saw nothing but such values
    float* scratch;
    size_t tile_room, open_room, low_room, start_room, lost_room, scratch_room;
};
static thread_local Plan plan;

template <class T> static bool room(T*& p, size_t& have, size_t want) {
    if (want <= have) return true;
    free(p);
    p = (T*)aligned_alloc(64, (want * sizeof(T) + 63) / 64 * 64);
    have = p ? want : 0;
    return p != nullptr;
}

struct Segment {
    int64_t b, h, first, rows, list;  // query positions [first, first + rows)
};

INLINE int64_t group_of(const SitsAttention* a) { return a->heads / a->kv_heads; }

INLINE Segment segment_of(const SitsAttention* a, const Plan& p, int64_t s) {
    int64_t t = s % p.blocks, h = s / p.blocks % a->kv_heads, b = s / p.blocks / a->kv_heads;
    int64_t first = t * p.block, rows = a->rows - first < p.block ? a->rows - first : p.block;
    int64_t list = b % p.b_lists * p.h_lists + h % p.h_lists;
    return {b, h, first, rows, list * p.t_lists + t % p.t_lists};
}

INLINE float mask_value(const SitsAttention* a, int64_t at) {
    uint16_t half;
    switch (a->mask_kind) {
        case 1: return ((const uint8_t*)a->mask)[at] ? 0.0f : -INFINITY;
        case 2: return ((const float*)a->mask)[at];
        case 3: half = ((const uint16_t*)a->mask)[at]; return from_bf16(half);
        default: half = ((const uint16_t*)a->mask)[at]; return from_f16(half);
    }
}

// No early exit, so that the loop becomes vectors. NaN counts as open.
INLINE int float_openness(const float* p, int n) {
    int open = 0, finite = 0;
    for (int i = 0; i < n; i++) {
        open |= p[i] <= LOW ? 0 : 2;
        finite |= p[i] > -INFINITY ? 1 : 0;
    }
    return open ? 2 : finite;
}

// 2: some key of the tile may be attended; 1: none, but some value is finite; 0: all closed.
static int openness(const SitsAttention* a, int64_t at, int n) {
    int64_t step = a->mask_stride[3];
    if (a->mask_kind == 1 && step == 1) {
        const uint8_t* p = (const uint8_t*)a->mask + at;
        uint64_t any = 0, word;
        int i = 0;
        for (; i + 8 <= n; i += 8) { memcpy(&word, p + i, 8); any |= word; }
        for (; i < n; i++) any |= p[i];
        return any ? 2 : 0;
    }
    if (a->mask_kind == 2 && step == 1) return float_openness((const float*)a->mask + at, n);
    if (a->mask_kind == 3 && step == 1) {
        float wide[TILE];
        for (int i = 0; i < n; i++) wide[i] = from_bf16(((const uint16_t*)a->mask)[at + i]);
        return float_openness(wide, n);
    }
    int seen = 0;
    for (int i = 0; i < n && seen < 2; i++) {
        float x = mask_value(a, at + i * step);
        seen |= float_openness(&x, 1);
    }
    return seen & 2 ? 2 : seen;
}

// Sizes and room; false when memory is short.
static bool lay_out(const SitsAttention* a, Plan& p) {
    const int64_t* ms = a->mask_stride;
    bool many = a->rows > FEW_ROWS;
    p.blocks = many ? (a->rows * group_of(a) + BLOCK_ROWS - 1) / BLOCK_ROWS : 1;
    p.block = (a->rows + p.blocks - 1) / p.blocks;
    p.blocks = (a->rows + p.block - 1) / p.block;
    p.tiles = (a->keys + TILE - 1) / TILE;
    p.segments = a->batch * a->kv_heads * p.blocks;
    p.b_lists = a->mask_kind && ms[0] ? a->batch : 1;
    p.h_lists = a->mask_kind && ms[1] ? a->kv_heads : 1;
    p.t_lists = (a->mask_kind && ms[2]) || a->causal ? p.blocks : 1;
    p.lists = p.b_lists * p.h_lists * p.t_lists;
    return room(p.tile, p.tile_room, p.lists * p.tiles) && room(p.open, p.open_room, p.lists) &&
           room(p.low, p.low_room, p.lists) && room(p.lost, p.lost_room, p.segments) &&
           room(p.start, p.start_room, p.segments + 1);
}

// Fills one list.
static void list_tiles(const SitsAttention* a, const Plan& p, int64_t list) {
    const int64_t* ms = a->mask_stride;
    int64_t t = list % p.t_lists, h = list / p.t_lists % p.h_lists, b = list / p.t_lists / p.h_lists;
    int64_t heads = a->mask_kind && ms[1] ? group_of(a) : 1, found = 0;
    int64_t first = t * p.block, last = p.t_lists > 1 ? first + p.block : a->rows;
    last = last < a->rows ? last : a->rows;
    int64_t keys = a->causal && last < a->keys ? last : a->keys;
    if (!(a->mask_kind && ms[2])) first = last - 1;  // one mask row stands for all
    p.low[list] = 0;
    for (int64_t at = 0; at * TILE < keys; at++) {
        int n = (int)(keys - at * TILE < TILE ? keys - at * TILE : TILE), open = a->mask_kind ? 0 : 2;
        for (int64_t g = 0; g < heads && open < 2; g++)
            for (int64_t r = first; r < last && open < 2; r++) {
                int64_t from = b * ms[0] + (h * heads + g) * ms[1] + r * ms[2] + at * TILE * ms[3];
                int seen = openness(a, from, n);
                open = seen > open ? seen : open;
            }
        if (open == 2) p.tile[list * p.tiles + found++] = (int32_t)at;
        if (open == 1) p.low[list] = 1;
    }
    p.open[list] = found;
}

static void count_tiles(const SitsAttention* a, const Plan& p) {
    p.start[0] = 0;
    for (int64_t s = 0; s < p.segments; s++)
        p.start[s + 1] = p.start[s] + p.open[segment_of(a, p, s).list];
}
"""
