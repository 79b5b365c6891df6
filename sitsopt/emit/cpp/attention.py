"""C++ text: attention that follows its mask (flash-decoding, Dao et al., 2023).

Work is lists of 64-key tiles in which the mask lets some row attend. Threads take equal runs of tiles,
keep a running softmax (Milakov and Gimelshein, 2018) and merge their partial results behind one barrier.
K and V are read once for all query heads of a group; a tile the mask closes is not read at all.
"""

from __future__ import annotations

from ..kernel import Attention
from .attention_merge import FINISH_TEXT, QUERY_TEXT, SWEEP_TEXT
from .attention_plan import PLAN_TEXT
from .attention_tile import TILE_TEXT

RUN_TEXT = r"""
// A thread's room: what a tile needs, and two partial results (its first and its last segment).
static size_t worker_room(int64_t r) { return tile_room(r) + 2 * partial_room(r) + 16; }
INLINE int64_t most_rows(const SitsAttention* a, const Plan& p) { return p.block * group_of(a); }

// Tiles [begin, end) of the flattened lists, segment after segment.
static void work(const SitsAttention* a, const Plan& p, float* mine, int64_t begin, int64_t end) {
    int64_t r = most_rows(a, p);
    int64_t* held = (int64_t*)(mine + tile_room(r) + 2 * partial_room(r));  // segments, or -1
    held[0] = held[1] = -1;
    int64_t s = 0;
    while (s < p.segments && p.start[s + 1] <= begin) s++;
    for (int slot = 0; begin < end; s++) {
        int64_t stop = p.start[s + 1] < end ? p.start[s + 1] : end;
        if (stop == begin) continue;
        bool whole = begin == p.start[s] && stop == p.start[s + 1];
        float* part = mine + tile_room(r) + slot * partial_room(r);
        Segment at = segment_of(a, p, s);
        sweep(a, at, p.tile + at.list * p.tiles + begin - p.start[s], stop - begin, mine, part);
        if (whole) p.lost[s] = finish(a, at, &part, 1);
        else held[slot++] = s;
        begin = stop;
    }
}

// Joins the partial results of segment s, which lie with up to `team` threads.
static void merge(const SitsAttention* a, const Plan& p, int64_t s, int team, size_t stride) {
    int64_t r = most_rows(a, p), n = 0;
    float* parts[2 * MAX_TEAM];
    for (int t = 0; t < team; t++) {
        float* theirs = p.scratch + t * stride;
        const int64_t* held = (const int64_t*)(theirs + tile_room(r) + 2 * partial_room(r));
        for (int slot = 0; slot < 2; slot++)
            if (held[slot] == s) parts[n++] = theirs + tile_room(r) + slot * partial_room(r);
    }
    if (n || p.start[s] == p.start[s + 1]) p.lost[s] = finish(a, segment_of(a, p, s), parts, (int)n);
}

static void team_member(const SitsAttention* a, const Plan& p, size_t stride, bool alone, bool listed) {
    int id = alone ? 0 : omp_get_thread_num(), team = alone ? 1 : omp_get_num_threads();
    if (!listed) {
        for (int64_t list = id; list < p.lists; list += team) list_tiles(a, p, list);
        if (!alone) {
#pragma omp barrier
        }
        if (id == 0) count_tiles(a, p);
        if (!alone) {
#pragma omp barrier
        }
    }
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
    int64_t r = most_rows(a, p);
    for (int64_t s = 0; s < p.segments; s++) {
        Segment at = segment_of(a, p, s);
        if (!p.low[at.list] || !p.lost[s]) continue;
        float* part = p.scratch + tile_room(r);
        int32_t* all = (int32_t*)(p.scratch + worker_room(r));
        for (int64_t t = 0; t < p.tiles; t++) all[t] = (int32_t)t;
        sweep(a, at, all, p.tiles, p.scratch, part);
        finish(a, at, &part, 1);
    }
}

extern "C" int SYMBOL(SitsAttention* a) {
    Plan& p = plan;
    if (!lay_out(a, p)) return 1;
    bool listed = p.blocks == 1;
    int64_t team = a->threads;
    if (listed) {
        for (int64_t list = 0; list < p.lists; list++) list_tiles(a, p, list);
        count_tiles(a, p);
        int64_t bytes = p.start[p.segments] * TILE * (HD + VD) * (int64_t)sizeof(elem);
        team = bytes / SHARE < team ? bytes / SHARE : team;
    }
    team = team < 1 || omp_in_parallel() ? 1 : team > MAX_TEAM ? MAX_TEAM : team;
    size_t stride = (worker_room(most_rows(a, p)) + 31) / 16 * 16;
    if (!room(p.scratch, p.scratch_room, stride * team + p.tiles + 16)) return 1;
    Plan* shared = &p;  // a thread_local name means another object in every thread
    if (team == 1) {
        team_member(a, *shared, stride, true, listed);
    } else {
#pragma omp parallel num_threads(team)
        team_member(a, *shared, stride, false, listed);
    }
    rescue(a, p);
    a->tiles_read = p.start[p.segments];
    return 0;
}

// For a caller with a team of its own, few query rows: one member opens, after a barrier all take part, after another
// all join, after a third one member closes where a mask holds numbers. null: memory is short.
INLINE size_t member_room(const SitsAttention* a, const Plan& p) { return (worker_room(most_rows(a, p)) + 31) / 16 * 16; }

extern "C" void* OPEN_SYMBOL(SitsAttention* a, int64_t team) {
    Plan& p = plan;
    if (team > MAX_TEAM || !lay_out(a, p) || p.blocks != 1) return nullptr;
    for (int64_t list = 0; list < p.lists; list++) list_tiles(a, p, list);
    count_tiles(a, p);
    return room(p.scratch, p.scratch_room, member_room(a, p) * team + p.tiles + 16) ? &p : nullptr;
}

extern "C" void PART_SYMBOL(const SitsAttention* a, const void* opened, int64_t id, int64_t team) {
    const Plan& p = *(const Plan*)opened;
    int64_t total = p.start[p.segments];
    work(a, p, p.scratch + id * member_room(a, p), total * id / team, total * (id + 1) / team);
}

extern "C" void JOIN_SYMBOL(const SitsAttention* a, const void* opened, int64_t id, int64_t team) {
    const Plan& p = *(const Plan*)opened;
    for (int64_t s = id; s < p.segments; s += team) merge(a, p, s, (int)team, member_room(a, p));
}

extern "C" void CLOSE_SYMBOL(const SitsAttention* a, void* opened) { rescue(a, *(Plan*)opened); }
"""


def text(kernel: Attention) -> str:
    """The attention translation unit after vectors, elements and structs."""
    return (
        header(kernel.head_dim, kernel.value_dim, kernel.symbol) + PLAN_TEXT + TILE_TEXT
        + QUERY_TEXT + SWEEP_TEXT + FINISH_TEXT + RUN_TEXT
    )  # fmt: skip


def header(head_dim: int, value_dim: int, symbol: str, extra: str = "0") -> str:
    """Sizes that the texts of attention read. extra: floats that a thread needs beside them."""
    return (
        f"#define HD {head_dim}\n#define VD {value_dim}\n"
        f"#define SYMBOL {symbol}\n#define OPEN_SYMBOL {symbol}_open\n"
        f"#define PART_SYMBOL {symbol}_part\n#define JOIN_SYMBOL {symbol}_join\n"
        f"#define CLOSE_SYMBOL {symbol}_close\n"
        f"#define TILE 64\n#define MAX_TEAM 256\n#define EXTRA_ROOM {extra}\n"
        "#if !defined(AFTER_ROW)\n#define AFTER_ROW(a, at, r, base, total)\n#endif\n"
        "#define SHARE 32768    // bytes of K and V below which another thread does not pay\n"
        "#define FEW_ROWS 16    // query positions that read K and V together\n"
        "#define BLOCK_ROWS 64  // query rows of a group, above that, in one block\n"
    )
