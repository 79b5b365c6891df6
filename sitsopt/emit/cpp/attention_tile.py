"""C++ text: one tile of attention: scores, softmax step, values; then the joining of partial results.

Rows are r = t * group + g, so that one mask row serves a whole group when heads share the mask.
"""

from __future__ import annotations

TILE_TEXT = r"""
#define CHUNK (2 * W)
#define VP ((VD + CHUNK - 1) / CHUNK * CHUNK)  // accumulators a row, whole chunks
#define WORDS ((HD + WORD_ELEMS - 1) / WORD_ELEMS)
#if defined(DOT2)
#define QP WORDS  // q as pairs of bf16
#else
#define QP (WORDS * WORD_ELEMS)  // q as f32
#endif
#define QROWS 8   // query rows that share one transposed block of keys
#define VROWS 6   // query rows that share one pass over values
#if W == 16
#define VCHUNKS 2
#else
#define VCHUNKS 1
#endif

// Floats: q, scores, bias, m-to-alpha; then a partial result: accumulators, m, l.
static size_t up(size_t n) { return (n + 15) / 16 * 16; }
static size_t tile_room(int64_t r) {
    return up(r * QP) + 2 * r * TILE + up(r) + EXTRA_ROOM;
}
static size_t partial_room(int64_t r) { return up(r * VP) + 2 * up(r); }

INLINE void key_words(const elem* p, int word, vu& out) {
    int left = HD * (int)sizeof(elem) - 4 * word;
    if (left >= 4 * W) { out = loadu((const char*)p + 4 * word); return; }
    out = (vu){};
    memcpy(&out, (const char*)p + 4 * word, left);
}

// Into the second-level cache: the first has too few outstanding misses to keep memory busy. Calls are spread
// over the work, as a burst of them would wait for one another.
INLINE void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// scores[r][0..64) = q[r] . k[key], RB rows; meanwhile the keys at `ahead` are fetched, if any. Keys are lanes: blocks of W keys by W words are transposed.
template <int RB>
static void score(const float* q, const elem* k, const elem* ahead, int64_t ks, int n, float* s) {
    for (int block = 0; block < n; block += W) {
        const elem* rows[W];
        for (int i = 0; i < W; i++) rows[i] = k + (block + i < n ? block + i : n - 1) * ks;
        vf acc[RB] = {}, acc2[RB] = {};
#pragma GCC unroll 2
        for (int c = 0; c < WORDS; c += W) {
            vu t[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) key_words(rows[i], c, t[i]);
            transpose(t);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) {
                if (ahead) fetch((const char*)(ahead + (block + i) * ks) + 4 * c);
                if (c + i >= WORDS) continue;
#if defined(DOT2)
#pragma GCC unroll 8
                for (int r = 0; r < RB; r++) {
                    vf& sum = i & 1 ? acc2[r] : acc[r];
                    sum = dot2(t[i], (vu)splat(q[r * QP + c + i]), sum);
                }
#elif WORD_ELEMS == 2
                vf even, odd;
                split(t[i], even, odd);
#pragma GCC unroll 8
                for (int r = 0; r < RB; r++) {
                    acc[r] = fma(even, splat(q[r * QP + 2 * (c + i)]), acc[r]);
                    acc2[r] = fma(odd, splat(q[r * QP + 2 * (c + i) + 1]), acc2[r]);
                }
#else
#pragma GCC unroll 8
                for (int r = 0; r < RB; r++) {
                    vf& sum = i & 1 ? acc2[r] : acc[r];
                    sum = fma((vf)t[i], splat(q[r * QP + c + i]), sum);
                }
#endif
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < RB; r++) storef(s + r * TILE + block, acc[r] + acc2[r]);
    }
    for (int block = (n + W - 1) / W * W; block < TILE; block += W)  // no leftovers: they might be NaN
        for (int r = 0; r < RB; r++) storef(s + r * TILE + block, (vf){});
}

#if defined(DOT2)
// Weights are kept as pairs of bf16, one pair for two keys; their sum is that of the f32 weights.
#define KEYS 2
INLINE void put_weights(float* s, const vf* w) {
#pragma GCC unroll 4
    for (int i = 0; i < TILE / W; i += 2) storef(s + i / 2 * W, (vf)pack2(w[i], w[i + 1]));
}
INLINE void load_values(const elem* row, int64_t vs, int pair, int size, vu& a, vu& b) {
    vu first = size == CHUNK ? loadu(row) : words_head(row, size), second = {};
    if (pair) second = size == CHUNK ? loadu(row + vs) : words_head(row + vs, size);
    a = zip_low(first, second);
    b = zip_high(first, second);
}
INLINE vu weight_of(const float* s) { return (vu)splat(*s); }
INLINE vf add_value(vu x, vu w, vf acc) { return dot2(x, w, acc); }
typedef vu value;
#else
#define KEYS 1
INLINE void put_weights(float* s, const vf* w) {
#pragma GCC unroll 16
    for (int i = 0; i < TILE / W; i++) storef(s + i * W, w[i]);
}
INLINE void load_values(const elem* row, int64_t, int, int size, vf& a, vf& b) {
    if (size == CHUNK) load2(row, a, b);
    else load2_head(row, size, a, b);
}
INLINE vf weight_of(const float* s) { return splat(*s); }
INLINE vf add_value(vf x, vf w, vf acc) { return fma(x, w, acc); }
typedef vf value;
#endif

// One softmax step of a row over a tile: scores become weights; returns what older sums shrink by.
INLINE float soften(float* s, const float* bias, float scale, float cap, float& m, float& l) {
    vf x[TILE / W], peak = splat(-INFINITY);
#pragma GCC unroll 16
    for (int i = 0; i < TILE / W; i++) {
        x[i] = loadf(s + i * W) * splat(scale);
        if (cap != 0.0f) x[i] = tanh(x[i] / splat(cap)) * splat(cap);
        if (bias) x[i] += loadf(bias + i * W);
        peak = max(x[i], peak);  // a NaN score is passed over here and shows in l
    }
    float high = top(peak), old = m;
    m = high > m ? high : m;
    float base = m == -INFINITY ? 0.0f : m;
    vf total = {};
#pragma GCC unroll 16
    for (int i = 0; i < TILE / W; i++) {
        x[i] = exp(x[i] - splat(base));
        total += x[i];
    }
    put_weights(s, x);
    float alpha = old == m && m > -INFINITY && m < INFINITY ? 1.0f : exp1(old - base);
    l = l * alpha + sum(total);
    return alpha;
}

// o[r][chunks from c] = o * alpha + sum over keys of weight * v.
template <int RB, int NC>
static void mix(const float* s, const elem* v, const elem* ahead, int64_t vs, int n, const float* alpha,
                float* o, int c) {
    vf acc[RB][2 * NC];
#pragma GCC unroll 8
    for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * NC; i++)
            acc[r][i] = loadf(o + r * VP + c * CHUNK + i * W) * splat(alpha[r]);
    bool tail = (c + NC) * CHUNK > VD;
    for (int j = 0; j < n; j += KEYS) {
        const elem* row = v + j * vs + c * CHUNK;
        if (ahead)
            for (int i = 0; i < KEYS; i++)
                for (int at = 0; at < VD; at += 64 / (int)sizeof(elem)) fetch(ahead + (j + i) * vs + at);
        value x[2 * NC];
#pragma GCC unroll 2
        for (int i = 0; i < NC; i++)
            load_values(row + i * CHUNK, vs, j + 1 < n, i + 1 == NC && tail ? VD % CHUNK : CHUNK,
                        x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 8
        for (int r = 0; r < RB; r++) {
            value w = weight_of(s + r * TILE + j / KEYS);
#pragma GCC unroll 4
            for (int i = 0; i < 2 * NC; i++) acc[r][i] = add_value(x[i], w, acc[r][i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * NC; i++) storef(o + r * VP + c * CHUNK + i * W, acc[r][i]);
}

template <int RB>
static void mix_all(const float* s, const elem* v, const elem* ahead, int64_t vs, int n, const float* alpha,
                    float* o) {
    int c = 0;
    for (; c + VCHUNKS <= VP / CHUNK; c += VCHUNKS)
        mix<RB, VCHUNKS>(s, v, c ? nullptr : ahead, vs, n, alpha, o, c);
    for (; c < VP / CHUNK; c++) mix<RB, 1>(s, v, c ? nullptr : ahead, vs, n, alpha, o, c);
}
"""
