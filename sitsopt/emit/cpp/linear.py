"""C++ text: a few rows of activations times row-major weights, read once, where they lie.

Work is units of 16 weight rows; all weights of a call form one list of units that the threads share out
equally, so several small linears cost one fork and join. Each weight vector is loaded once for all
activation rows; sums stay in f32 lanes until 16 rows are done, then one transposition adds them up.
An output does not depend on how units fall to threads.
"""

from __future__ import annotations

from ..kernel import Linear

_DOT = r"""
#define UNIT 16
#define CHUNK (2 * W)
#define CHUNK_BYTES (CHUNK * (int)sizeof(elem))
#define STEPS (128 / CHUNK_BYTES)  // chunks in a pair of cache lines
#define STREAM_BYTES 24576         // of x, which must stay in the first-level cache beside the stream
#define MOST_ROWS 16
#if W == 16
#define GROUP 4  // weight rows that share a load of x
#define BLOCK 6  // activation rows that share a load of weights: GROUP * BLOCK sums in registers
#else
#define GROUP 2
#define BLOCK 4
#endif
#if !defined(AHEAD)
#define AHEAD 8192  // bytes of software prefetch
#endif

// CHUNK elements as they enter a product. Activations are prepared once a call, as rows of whole
// chunks that are zero beyond k: with dot2 as pairs of bf16, else as f32 in load2's order.
#if defined(DOT2)
#define XCHUNK W
struct Chunk { vu words; };
INLINE Chunk chunk(const elem* p) { return {loadu(p)}; }
INLINE Chunk chunk_head(const elem* p, int n) { return {words_head(p, n)}; }
INLINE Chunk x_chunk(const float* x) { return {loadu(x)}; }
INLINE void keep(float* x, Chunk c) { storef(x, (vf)c.words); }
INLINE vf dot(Chunk a, Chunk b, vf sum) { return dot2(a.words, b.words, sum); }
#else
#define XCHUNK CHUNK
struct Chunk { vf p, q; };
INLINE Chunk chunk(const elem* p) { Chunk c; load2(p, c.p, c.q); return c; }
INLINE Chunk chunk_head(const elem* p, int n) { Chunk c; load2_head(p, n, c.p, c.q); return c; }
INLINE Chunk x_chunk(const float* x) { return {loadf(x), loadf(x + W)}; }
INLINE void keep(float* x, Chunk c) { storef(x, c.p); storef(x + W, c.q); }
INLINE vf dot(Chunk a, Chunk b, vf sum) { return fma(a.q, b.q, fma(a.p, b.p, sum)); }
#endif

// One chunk more where rows a power of two apart would fall into the same few cache sets.
INLINE int64_t x_stride(int64_t k) {
    int64_t n = (k + CHUNK - 1) / CHUNK * XCHUNK;
    return n % 256 ? n : n + XCHUNK;
}

static void prepare(const SitsLinear* a, float* x) {
    for (int64_t m = 0; m < a->m; m++) {
        const elem* from = (const elem*)a->x + m * a->ldx;
        float* at = x + m * x_stride(a->k);
        int64_t k = 0;
        for (; k + CHUNK <= a->k; k += CHUNK, at += XCHUNK) keep(at, chunk(from + k));
        if (k < a->k) keep(at, chunk_head(from + k, (int)(a->k - k)));
    }
}

// NR weight rows of n elements against M activation rows; lane sums go to pend[row][m]. S sums each hide
// the latency of a multiply-add where few rows do not. ahead: rows read later. They are fetched into the
// second-level cache, as the first has too few outstanding misses to keep memory busy; a single stream
// asks for one line of two, as memory brings its neighbour along (measured on Zen 4).
template <int M, int NR, int S>
INLINE void dot_rows(const elem* const* w, const elem* const* ahead, const float* x, int64_t xs, int64_t n,
                     vf* pend, int64_t rows) {
    constexpr int U = NR > 1 ? 1 : S > STEPS ? S : STEPS, LINE = NR > 1 ? 64 : 128;
    vf sums[S][NR][M] = {};
    int64_t done = 0;
    for (; done + U * CHUNK <= n; done += U * CHUNK, x += U * XCHUNK) {
#pragma GCC unroll 8
        for (int u = 0; u < U; u++) {
            Chunk c[NR];
#pragma GCC unroll 4
            for (int i = 0; i < NR; i++) {
                const char* next = (const char*)(ahead[i] + done + u * CHUNK);
                if (u % (LINE / CHUNK_BYTES ? LINE / CHUNK_BYTES : 1) == 0)
                    for (int line = 0; line < CHUNK_BYTES; line += LINE) __builtin_prefetch(next + line, 0, 2);
                c[i] = chunk(w[i] + done + u * CHUNK);
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                Chunk xc = x_chunk(x + m * xs + u * XCHUNK);
#pragma GCC unroll 4
                for (int i = 0; i < NR; i++) sums[u % S][i][m] = dot(c[i], xc, sums[u % S][i][m]);
            }
        }
    }
    for (; done < n; done += CHUNK, x += XCHUNK) {
#pragma GCC unroll 4
        for (int i = 0; i < NR; i++) {
            Chunk c = done + CHUNK <= n ? chunk(w[i] + done) : chunk_head(w[i] + done, (int)(n - done));
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) sums[0][i][m] = dot(c, x_chunk(x + m * xs), sums[0][i][m]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < NR; i++)
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
            for (int u = 1; u < S; u++) sums[0][i][m] += sums[u][i][m];
            pend[i * rows + m] = sums[0][i][m];
        }
}
typedef void (*RowsFn)(const elem* const*, const elem* const*, const float*, int64_t, int64_t, vf*, int64_t);
template <int M> static void dot_group(const elem* const* w, const elem* const* ahead, const float* x,
                                       int64_t xs, int64_t n, vf* pend, int64_t rows) {
    dot_rows<M, GROUP, 1>(w, ahead, x, xs, n, pend, rows);
}
static const RowsFn GROUPS[BLOCK] = {
    dot_group<1>, dot_group<2>, dot_group<3>, dot_group<4>,
#if BLOCK == 6
    dot_group<5>, dot_group<6>,
#endif
};

// Sixteen lane sums become sixteen numbers.
INLINE void add_lanes(const vf* pend, int64_t rows, float* out) {
    for (int part = 0; part < UNIT; part += W) {
        vu t[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) t[i] = (vu)pend[(part + i) * rows];
        transpose(t);
#pragma GCC unroll 4
        for (int h = W / 2; h; h /= 2)
#pragma GCC unroll 8
            for (int i = 0; i < h; i++) t[i] = (vu)((vf)t[i] + (vf)t[i + h]);
        storef(out + part, (vf)t[0]);
    }
}

// Sixteen weight rows against one or two activation rows: row after row is one stream through memory.
template <int M> static void stream_unit(const elem* const* w, const float* x, int64_t k, vf* pend) {
    for (int i = 0; i < UNIT; i++) {
        const elem* ahead = w[i] + AHEAD / (int)sizeof(elem);
        dot_rows<M, 1, 4 / M>(w + i, &ahead, x, x_stride(k), k, pend + i * M, M);
    }
}

// Sixteen weight rows against several activation rows: groups of rows share each load of x.
static void group_unit(const elem* const* w, const float* x, int64_t k, int64_t m, int64_t ldw, vf* pend) {
    int64_t xs = x_stride(k), blocks = (m + BLOCK - 1) / BLOCK, block = (m + blocks - 1) / blocks;
    for (int i = 0; i < UNIT; i += GROUP) {
        const elem* ahead[GROUP];
        for (int j = 0; j < GROUP; j++)
            ahead[j] = i + GROUP < UNIT ? w[i + GROUP + j] : w[j] + UNIT * ldw;
        for (int64_t r = 0; r < m; r += block) {
            int64_t size = m - r < block ? m - r : block;
            GROUPS[size - 1](w + i, ahead, x + r * xs, xs, k, pend + i * m + r, m);
        }
    }
}

static void unit_sums(const SitsLinear* a, const SitsWeight& weight, const float* x, int64_t from,
                      float (*out)[UNIT]) {
    const elem* rows[UNIT];
    for (int i = 0; i < UNIT; i++)
        rows[i] = (const elem*)weight.w + (from + i < weight.n ? from + i : weight.n - 1) * weight.ldw;
    vf pend[UNIT * MOST_ROWS];
    bool stream = a->m * a->m * x_stride(a->k) * 4 <= STREAM_BYTES;
    if (a->m == 1 && stream) stream_unit<1>(rows, x, a->k, pend);
    else if (a->m == 2 && stream) stream_unit<2>(rows, x, a->k, pend);
    else group_unit(rows, x, a->k, a->m, weight.ldw, pend);
    for (int64_t m = 0; m < a->m; m++) add_lanes(pend + m, a->m, out[m]);
    if (!weight.bias) return;
    for (int i = 0; i < UNIT && from + i < weight.n; i++) {
        float bias = widen(((const elem*)weight.bias)[from + i]);
        for (int64_t m = 0; m < a->m; m++) out[m][i] += bias;
    }
}
"""

_RUN = r"""
static void write_unit(const SitsLinear* a, const SitsWeight& weight, int64_t from, float (*sums)[UNIT]) {
    int64_t n = weight.n - from < UNIT ? weight.n - from : UNIT;
    for (int64_t m = 0; m < a->m; m++) {
        elem* out = (elem*)weight.out + m * weight.ldo + from;
        for (int64_t i = 0; i < n; i++) out[i] = narrow(sums[m][i]);
    }
}

INLINE int64_t units_of(const SitsWeight& weight) { return (weight.n + UNIT - 1) / UNIT; }

static void linear_units(const SitsLinear* a, const float* x, int64_t begin, int64_t end) {
    float sums[MOST_ROWS][UNIT];
    for (int64_t i = 0, first = 0; i < a->count && first < end; i++) {
        const SitsWeight& weight = a->weights[i];
        int64_t last = first + units_of(weight);
        for (; begin < last && begin < end; begin++) {
            unit_sums(a, weight, x, (begin - first) * UNIT, sums);
            write_unit(a, weight, (begin - first) * UNIT, sums);
        }
        first = last;
    }
}

// act(gate) * up, in f32, rounded once.
INLINE vf activate(int act, vf g) {
    if (act == 0) return g / (splat(1.0f) + exp(-g));
    vf inner = splat(0.797884561f) * fma(splat(0.044715f) * g * g, g, g);  // sqrt(2/pi)
    return splat(0.5f) * g * (splat(1.0f) + tanh(inner));
}

static void gated_units(const SitsLinear* a, const float* x, int64_t begin, int64_t end) {
    float gate[MOST_ROWS][UNIT], value[MOST_ROWS][UNIT];
    for (; begin < end; begin++) {
        unit_sums(a, a->weights[0], x, begin * UNIT, gate);
        unit_sums(a, a->weights[1], x, begin * UNIT, value);
        for (int64_t m = 0; m < a->m; m++)
            for (int i = 0; i < UNIT; i += W)
                storef(gate[m] + i, activate(a->act, loadf(gate[m] + i)) * loadf(value[m] + i));
        write_unit(a, a->weights[0], begin * UNIT, gate);
    }
}

typedef void (*RangeFn)(const SitsLinear*, const float*, int64_t, int64_t);
static thread_local float* x_room;
static thread_local int64_t x_have;

static int spread(const SitsLinear* a, int64_t units, int64_t bytes, RangeFn run) {
    int64_t want = a->m * x_stride(a->k);
    if (want > x_have) {
        free(x_room);
        x_room = (float*)aligned_alloc(64, (want * 4 + 63) / 64 * 64);
        x_have = x_room ? want : 0;
        if (!x_room) return 1;
    }
    float* x = x_room;
    prepare(a, x);
    int64_t team = bytes / SHARE < a->threads ? bytes / SHARE : a->threads;
    if (team <= 1 || omp_in_parallel()) {
        run(a, x, 0, units);
        return 0;
    }
#pragma omp parallel num_threads(team)
    {
        int64_t id = omp_get_thread_num(), members = omp_get_num_threads();
        run(a, x, units * id / members, units * (id + 1) / members);
    }
    return 0;
}

extern "C" int SYMBOL(const SitsLinear* a) {
    int64_t units = 0;
    for (int64_t i = 0; i < a->count; i++) units += units_of(a->weights[i]);
    return spread(a, units, units * UNIT * a->k * (int64_t)sizeof(elem), linear_units);
}

// weights: gate, up of one shape; the result goes to the gate's out.
extern "C" int GATED_SYMBOL(const SitsLinear* a) {
    int64_t units = units_of(a->weights[0]);
    return spread(a, units, 2 * units * UNIT * a->k * (int64_t)sizeof(elem), gated_units);
}

// The fastest plain read this machine gives: what a kernel's bandwidth is measured against.
extern "C" float PROBE_SYMBOL(const char* p, int64_t bytes, int32_t threads) {
    float result = 0.0f;
#pragma omp parallel num_threads(threads) reduction(+ : result)
    {
        int64_t lines = bytes / 256, id = omp_get_thread_num(), team = omp_get_num_threads();
        int64_t begin = lines * id / team * 256, end = lines * (id + 1) / team * 256;
        vf a = {}, b = {}, c = {}, d = {};
        for (int64_t i = begin; i < end; i += 16 * W) {
            if (i % 128 == 0) __builtin_prefetch(p + i + AHEAD, 0, 2);
            if (W == 16) __builtin_prefetch(p + i + AHEAD + 128, 0, 2);
            a += loadf(p + i);
            b += loadf(p + i + 4 * W);
            c += loadf(p + i + 8 * W);
            d += loadf(p + i + 12 * W);
        }
        result += sum(a + b + c + d);
    }
    return result;
}
"""


def text(kernel: Linear) -> str:
    """The linear translation unit after vectors, elements and structs."""
    head = (
        f"#define SYMBOL {kernel.symbol}\n#define GATED_SYMBOL {kernel.symbol}_gated\n"
        f"#define PROBE_SYMBOL {kernel.symbol}_probe\n"
        "#define SHARE 32768  // bytes of weights below which another thread does not pay\n"
    )
    return head + _DOT + _RUN
