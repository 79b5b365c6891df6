"""C++ text: attention of a few query rows over a long cache (flash-decoding, Dao et al., 2023).

Work is a list of 64-key tiles, one list a (batch, kv head), in which the mask lets some row attend. Threads
take equal runs of tiles, keep a running softmax (Milakov and Gimelshein, 2018) and merge their partial
results behind one barrier. K and V are read once for all query heads of a group; a tile the mask
closes is not read at all.
"""

from __future__ import annotations

from ..kernel import Attention
from .attention_merge import MERGE_TEXT
from .attention_tile import TILE_TEXT

_PLAN = r"""
// Scores of rows that see nothing above this are decided elsewhere: see `rescue`.
#define LOW -1e30f

struct Plan {  // of the calling thread; its buffers only grow
    int64_t segments, lists, tiles;   // a segment is one (batch, kv head)
    int32_t* tile;                    // [lists][tiles] live tiles
    int64_t* live;                    // [lists]
    int64_t* start;                   // [segments + 1] running count of live tiles
    char* low;                        // [lists] a closed tile had finite, very low mask values
    char* lost;                       // [segments] some row saw nothing but such values
    float* scratch;
    size_t tile_room, live_room, low_room, lost_room, start_room, scratch_room;
};
static thread_local Plan plan;

template <class T> static bool room(T*& p, size_t& have, size_t want) {
    if (want <= have) return true;
    free(p);
    p = (T*)aligned_alloc(64, (want * sizeof(T) + 63) / 64 * 64);
    have = p ? want : 0;
    return p != nullptr;
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
    int seen = 0;
    for (int i = 0; i < n; i++) {
        float x = mask_value(a, at + i * step);
        if (!(x <= LOW)) return 2;  // NaN counts as open
        if (x > -INFINITY) seen = 1;
    }
    return seen;
}

static int64_t last_key(const SitsAttention* a) {
    return a->causal && a->rows < a->keys ? a->rows : a->keys;
}

// Lists the live tiles of every (batch, kv head) that has a mask of its own.
static bool make_plan(const SitsAttention* a) {
    Plan& p = plan;
    const int64_t* ms = a->mask_stride;
    int64_t keys = last_key(a), group = a->heads / a->kv_heads;
    bool by_batch = a->mask_kind && ms[0] && a->batch > 1, by_head = a->mask_kind && ms[1];
    int64_t rows = a->mask_kind && ms[2] ? a->rows : 1;
    p.tiles = (keys + TILE - 1) / TILE;
    p.segments = a->batch * a->kv_heads;
    p.lists = (by_batch ? a->batch : 1) * (by_head ? a->kv_heads : 1);
    if (!room(p.tile, p.tile_room, p.lists * p.tiles) || !room(p.low, p.low_room, p.lists) ||
        !room(p.live, p.live_room, p.lists) || !room(p.lost, p.lost_room, p.segments) ||
        !room(p.start, p.start_room, p.segments + 1))
        return false;
    for (int64_t list = 0; list < p.lists; list++) {
        int64_t b = by_batch ? (by_head ? list / a->kv_heads : list) : 0;
        int64_t h = by_head ? list % a->kv_heads : 0, live = 0;
        p.low[list] = 0;
        for (int64_t t = 0; t < p.tiles; t++) {
            int open = a->mask_kind ? 0 : 2, n = (int)(keys - t * TILE < TILE ? keys - t * TILE : TILE);
            for (int64_t g = 0; g < (by_head ? group : 1) && open < 2; g++)
                for (int64_t r = 0; r < rows && open < 2; r++) {
                    int64_t at = b * ms[0] + (h * group + g) * ms[1] + r * ms[2] + t * TILE * ms[3];
                    int seen = openness(a, at, n);
                    open = seen > open ? seen : open;
                }
            if (open == 2) p.tile[list * p.tiles + live++] = (int32_t)t;
            if (open == 1) p.low[list] = 1;
        }
        p.live[list] = live;
    }
    p.start[0] = 0;
    for (int64_t s = 0; s < p.segments; s++) {
        int64_t list = (by_batch ? s / a->kv_heads * (by_head ? a->kv_heads : 1) : 0) +
                       (by_head ? s % a->kv_heads : 0);
        p.start[s + 1] = p.start[s] + p.live[list];
    }
    return true;
}
INLINE int64_t list_of(const SitsAttention* a, const Plan& p, int64_t s) {
    if (p.lists == p.segments) return s;
    if (p.lists == 1) return 0;
    return p.lists == a->batch ? s / a->kv_heads : s % a->kv_heads;
}
"""

_RUN = r"""
// A thread's room: what a tile needs, and two partial results (its first and its last segment).
static size_t worker_room(int64_t r) {
    return tile_room(r) + 2 * partial_room(r) + 16;
}

// Tiles [begin, end) of the flattened list, segment after segment.
static void work(const SitsAttention* a, const Plan& p, float* mine, int64_t begin, int64_t end) {
    int64_t r = a->rows * (a->heads / a->kv_heads);
    int64_t* held = (int64_t*)(mine + tile_room(r) + 2 * partial_room(r));  // segments, or -1
    held[0] = held[1] = -1;
    int64_t s = 0;
    while (s < p.segments && p.start[s + 1] <= begin) s++;
    for (int slot = 0; begin < end; s++) {
        int64_t stop = p.start[s + 1] < end ? p.start[s + 1] : end;
        if (stop == begin) continue;
        bool whole = begin == p.start[s] && stop == p.start[s + 1];
        float* part = mine + tile_room(r) + slot * partial_room(r);
        const int32_t* tiles = p.tile + list_of(a, p, s) * p.tiles - p.start[s];
        sweep(a, s, tiles + begin, stop - begin, mine, part);
        if (whole) p.lost[s] = finish(a, s, &part, 1);
        else held[slot++] = s;
        begin = stop;
    }
}

// Joins the partial results of segment s, which lie with up to `team` threads.
static void merge(const SitsAttention* a, const Plan& p, int64_t s, int team, size_t stride) {
    int64_t r = a->rows * (a->heads / a->kv_heads), n = 0;
    float* parts[2 * MAX_TEAM];
    for (int t = 0; t < team; t++) {
        float* theirs = p.scratch + t * stride;
        const int64_t* held = (const int64_t*)(theirs + tile_room(r) + 2 * partial_room(r));
        for (int slot = 0; slot < 2; slot++)
            if (held[slot] == s) parts[n++] = theirs + tile_room(r) + slot * partial_room(r);
    }
    if (n || p.start[s] == p.start[s + 1]) p.lost[s] = finish(a, s, parts, (int)n);
}

static void team_member(const SitsAttention* a, const Plan& p, size_t stride, bool alone) {
    int id = alone ? 0 : omp_get_thread_num(), team = alone ? 1 : omp_get_num_threads();
    int64_t total = p.start[p.segments];
    work(a, p, p.scratch + id * stride, total * id / team, total * (id + 1) / team);
    if (!alone) {
#pragma omp barrier
    }
    for (int64_t s = id; s < p.segments; s += team) merge(a, p, s, team, stride);
}

// A row whose every open key is masked by a finite, very low number attends all such keys, the
// closed tiles' too: finfo.min everywhere means the mean of V. Rare, so the segment is done again.
static void rescue(const SitsAttention* a, Plan& p) {
    int64_t r = a->rows * (a->heads / a->kv_heads);
    for (int64_t s = 0; s < p.segments; s++) {
        int64_t list = list_of(a, p, s);
        if (!p.low[list] || !p.lost[s]) continue;
        float* part = p.scratch + tile_room(r);
        int32_t* all = (int32_t*)(p.scratch + worker_room(r));
        for (int64_t t = 0; t < p.tiles; t++) all[t] = (int32_t)t;
        sweep(a, s, all, p.tiles, p.scratch, part);
        finish(a, s, &part, 1);
    }
}

extern "C" int SYMBOL(SitsAttention* a) {
    Plan& p = plan;
    if (!make_plan(a)) return 1;
    int64_t total = p.start[p.segments], group = a->heads / a->kv_heads;
    int64_t bytes = total * TILE * (HD + VD) * (int64_t)sizeof(elem);
    int64_t team = bytes / SHARE < a->threads ? bytes / SHARE : a->threads;
    team = team < 1 || omp_in_parallel() ? 1 : team > MAX_TEAM ? MAX_TEAM : team;
    size_t stride = (worker_room(a->rows * group) + 31) / 16 * 16;
    size_t extra = p.tiles + 16;
    if (!room(p.scratch, p.scratch_room, stride * team + extra)) return 1;
    Plan* shared = &p;  // a thread_local name means another object in every thread
    if (team == 1) {
        team_member(a, *shared, stride, true);
    } else {
#pragma omp parallel num_threads(team)
        team_member(a, *shared, stride, false);
    }
    rescue(a, p);
    a->tiles_read = total;
    return 0;
}
"""


def text(kernel: Attention) -> str:
    """The attention translation unit after vectors, elements and structs."""
    head = (
        f"#define HD {kernel.head_dim}\n#define VD {kernel.value_dim}\n"
        f"#define SYMBOL {kernel.symbol}\n#define TILE 64\n#define MAX_TEAM 256\n"
        "#define SHARE 32768  // bytes of K and V below which another thread does not pay\n"
    )
    return head + _PLAN + TILE_TEXT + MERGE_TEXT + _RUN
