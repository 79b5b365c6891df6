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
#define MOST_ROWS 16
#if W == 16
#define MOST_SUMS 24  // of 32 vector registers
#define BLOCK 16      // activation rows a pass over the weights may take
#else
#define MOST_SUMS 10
#define BLOCK 8
#endif
#if !defined(AHEAD)
#define AHEAD 2048  // bytes of software prefetch
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

INLINE int64_t x_stride(int64_t k) { return (k + CHUNK - 1) / CHUNK * XCHUNK; }

static void prepare(const SitsLinear* a, float* x) {
    for (int64_t m = 0; m < a->m; m++) {
        const elem* from = (const elem*)a->x + m * a->ldx;
        int64_t k = 0;
        for (; k + CHUNK <= a->k; k += CHUNK, x += XCHUNK) keep(x, chunk(from + k));
        if (k < a->k) {
            keep(x, chunk_head(from + k, (int)(a->k - k)));
            x += XCHUNK;
        }
    }
}

// NR weight rows against M activation rows; lane sums go to pend[row][m].
template <int M, int NR>
INLINE void dot_rows(const elem* const* w, const float* x, int64_t k, vf* pend) {
    vf sums[NR][M] = {};
    int64_t xs = x_stride(k), done = 0;
    Chunk rows[NR];
    auto multiply = [&]() {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            Chunk xc = x_chunk(x + m * xs);
#pragma GCC unroll 4
            for (int i = 0; i < NR; i++) sums[i][m] = dot(rows[i], xc, sums[i][m]);
        }
    };
    for (; done + CHUNK <= k; done += CHUNK, x += XCHUNK) {
#pragma GCC unroll 4
        for (int i = 0; i < NR; i++) {
            for (int line = 0; line < CHUNK_BYTES; line += 64)
                __builtin_prefetch((const char*)(w[i] + done) + AHEAD + line);
            rows[i] = chunk(w[i] + done);
        }
        multiply();
    }
    if (done < k) {
        for (int i = 0; i < NR; i++) rows[i] = chunk_head(w[i] + done, (int)(k - done));
        multiply();
    }
#pragma GCC unroll 4
    for (int i = 0; i < NR; i++)
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) pend[i * M + m] = sums[i][m];
}

// Sixteen weight rows against M activation rows: out[m][row].
template <int M>
static void dot_unit(const elem* const* w, const float* x, int64_t k, float (*out)[UNIT]) {
    constexpr int NR = 4 * M <= MOST_SUMS ? 4 : 2 * M <= MOST_SUMS ? 2 : 1;
    vf pend[UNIT * M];
    for (int i = 0; i < UNIT; i += NR) dot_rows<M, NR>(w + i, x, k, pend + i * M);
    for (int m = 0; m < M; m++)
        for (int part = 0; part < UNIT; part += W) {
            vu t[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) t[i] = (vu)pend[(part + i) * M + m];
            transpose(t);
#pragma GCC unroll 4
            for (int h = W / 2; h; h /= 2)
#pragma GCC unroll 8
                for (int i = 0; i < h; i++) t[i] = (vu)((vf)t[i] + (vf)t[i + h]);
            storef(out[m] + part, (vf)t[0]);
        }
}
typedef void (*UnitFn)(const elem* const*, const float*, int64_t, float (*)[UNIT]);
static const UnitFn UNITS[BLOCK] = {
    dot_unit<1>, dot_unit<2>, dot_unit<3>, dot_unit<4>, dot_unit<5>, dot_unit<6>, dot_unit<7>, dot_unit<8>,
#if BLOCK == 16
    dot_unit<9>, dot_unit<10>, dot_unit<11>, dot_unit<12>, dot_unit<13>, dot_unit<14>, dot_unit<15>,
    dot_unit<16>,
#endif
};

static void unit_sums(const SitsLinear* a, const SitsWeight& weight, const float* x, int64_t from,
                      float (*out)[UNIT]) {
    const elem* rows[UNIT];
    for (int i = 0; i < UNIT; i++)
        rows[i] = (const elem*)weight.w + (from + i < weight.n ? from + i : weight.n - 1) * weight.ldw;
    for (int64_t m = 0; m < a->m; m += BLOCK) {
        int64_t size = a->m - m < BLOCK ? a->m - m : BLOCK;
        UNITS[size - 1](rows, x + m * x_stride(a->k), a->k, out + m);
    }
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
            __builtin_prefetch(p + i + AHEAD);
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
