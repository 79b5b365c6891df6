"""C++ text: sixteen weight rows against a few rows of activations.

One or two rows of activations follow the weights as one stream through memory; more of them share each
load of a group of weight rows. Sums stay in f32 lanes until sixteen rows are done, then one transposition
adds them up.
"""

from __future__ import annotations

DOT_TEXT = r"""
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
