"""C++ text: sixteen rows of quantized weights against a few rows of activations, in three ways.

Exact: weights become f32 and so do activations; what every machine can do. Integers (VNNI): activations become
15-bit integers, or 8-bit ones where the description says so, with a scale for every step of k's. Pairs (AVX-512
BF16, 8-bit floats): weights become bf16, which is exact, and meet bf16 activations.
"""

from __future__ import annotations

DOT_TEXT = r"""
#define UNIT 16
#define PARTS (UNIT / W)  // vectors that hold a value of every row
#define LINE 64           // bytes with LINE_K k's of every row
#define STEPS (GROUP / STEP)
#define STEP_LINES (STEP / LINE_K)
#define GROUP_LINES (GROUP / LINE_K)
#define GROUP_BYTES (GROUP_LINES * LINE + GROUPED * (32 + 32 * LOW))
#define MOST_ROWS 16
#if W == 16
#define BLOCK 8  // rows of activations that share a read of the weights
#else
#define BLOCK 4
#endif
#if defined(__AVX512VNNI__) && !defined(FP8) && (WORD_ELEMS == 2 || INTEGER_X)
#define INTEGER
#elif defined(DOT2) && defined(FP8) && !INTEGER_X
#define PAIRS
#endif
#if !defined(AHEAD)
#define AHEAD 8192  // bytes of software prefetch, into the second-level cache
#endif

INLINE int64_t groups_of(int64_t k) { return (k + GROUP - 1) / GROUP; }
// Rows of activations go through the weights in blocks of equal size, whose values stand side by side.
INLINE int64_t block_of(int64_t m) {
    int64_t blocks = (m + BLOCK - 1) / BLOCK;
    return (m + blocks - 1) / blocks;
}

// One line of two is asked for: memory brings its neighbour along.
INLINE void fetch(const uint8_t* line, int64_t i) {
    if (i % 2 == 0) __builtin_prefetch(line + AHEAD, 0, 2);
}

INLINE vf scales_at(const uint8_t* p, int part) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + part * 2 * W)));
#else
    vf r;
    for (int i = 0; i < W; i++) {
        uint16_t half;
        memcpy(&half, p + 2 * (part * W + i), 2);
        r[i] = from_f16(half);
    }
    return r;
#endif
}

// What follows the groups of a unit: 16 factors, then, with LOW and no groups, 16 lowest values over the factor.
INLINE const uint8_t* factors_of(const uint8_t* unit, int64_t k) { return unit + groups_of(k) * GROUP_BYTES; }

static void finish(const SitsLinear* a, const SitsWeight& weight, const uint8_t* unit, int64_t from,
                   float (*out)[UNIT]) {
    const uint8_t* factors = factors_of(unit, a->k);
    for (int64_t m = 0; m < a->m; m++)
        for (int i = 0; i < UNIT; i += W) storef(out[m] + i, loadf(out[m] + i) * loadf(factors + 4 * i));
    if (!weight.bias) return;
    for (int i = 0; i < UNIT && from + i < weight.n; i++) {
        float bias = widen(((const elem*)weight.bias)[from + i]);
        for (int64_t m = 0; m < a->m; m++) out[m][i] += bias;
    }
}

// The largest absolute value among n elements; inf or NaN where one is.
static float largest(const elem* x, int64_t n) {
    int32_t top = 0;  // as integers, which order sizes as floats do
    for (int64_t i = 0; i < n; i++) {
        float value = widen(x[i]);
        int32_t bits;
        memcpy(&bits, &value, 4);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float r;
    memcpy(&r, &top, 4);
    return r;
}

// n of STEP elements as integers of up to `most`, the rest zero; what one of them is worth. Below 2^-113 all are zero.
static float integers(const elem* x, int64_t n, float top, float most, int32_t* out) {
    float inverse = top < 9.6e-35f ? 0.0f : most / top;
    for (int64_t i = 0; i < n; i++) {
        float shifted = widen(x[i]) * inverse + 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        out[i] = bits - 0x4b400000;
    }
    for (int64_t i = n; i < STEP; i++) out[i] = 0;
    return top < 9.6e-35f ? 0.0f : top / most;
}
"""

EXACT_TEXT = r"""
INLINE int64_t exact_stride(int64_t k) { return groups_of(k) * GROUP; }

// A row as f32, `rows` words apart, zeros up to a whole group; with INTEGER_X rounded to what integers are worth.
static void prepare_exact(const elem* from, int64_t k, float* to, int64_t rows) {
    for (int64_t i = 0; i < groups_of(k) * GROUP; i++) to[i * rows] = i < k ? widen(from[i]) : 0.0f;
    for (int64_t at = 0; INTEGER_X && at < k; at += STEP) {
        int32_t rounded[STEP];
        int64_t n = k - at < STEP ? k - at : STEP;
        float top = largest(from + at, n);
        if (!(top < INFINITY)) continue;
        float worth = integers(from + at, n, top, 127.0f, rounded);
        for (int64_t i = 0; i < n; i++) to[(at + i) * rows] = (float)rounded[i] * worth;
    }
}

INLINE vf as_floats(vi x) { return __builtin_convertvector(x, vf); }

// The numbers that a line's bytes or nibbles mean, LINE_K vectors of them, before any scale.
INLINE void numbers(vu line, vf* out) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
#if defined(INT8)
        out[j] = as_floats((vi)(line << (24 - 8 * j)) >> 24);
#elif defined(INT4)
        const vi middle = (vi)splatu(LOW ? 0 : 8);
        out[j] = as_floats((vi)(line >> (8 * j) & splatu(15)) - middle);
        out[4 + j] = as_floats((vi)(line >> (8 * j + 4) & splatu(15)) - middle);
#else
        const int at[4] = {0, 2, 1, 3};  // two halves of a word are neighbours in k
        vu byte = line >> (8 * at[j]), size = byte & splatu(0x7f);
        vu tiny = (vu)(as_floats((vi)size) * splat(0.001953125f));  // below 8: units of 2^-9
        vu value = size < splatu(8) ? tiny : (size << 20) + splatu(120u << 23);
        out[j] = (vf)(value | (byte & splatu(0x80)) << 24);
#endif
    }
}

template <int M> static void exact_sums(const uint8_t* unit, const float* x, int64_t k, float (*out)[UNIT]) {
    constexpr int S = M == 1 ? 4 : M == 2 ? 2 : 1;  // sums that hide a multiplication's latency
    const uint8_t* end = factors_of(unit, k);
    for (int part = 0; part < PARTS; part++) {
        vf total[M] = {};
        vf low = LOW && !GROUPED ? loadf(end + 64 + part * 4 * W) : splat(0.0f), scale = low;
        const float* xg = x;
        for (const uint8_t* group = unit; group < end; group += GROUP_BYTES, xg += GROUP * M) {
            vf sums[S][M] = {};
            if (GROUPED) scale = scales_at(group + GROUP_LINES * LINE, part);
            if (GROUPED && LOW) low = scales_at(group + GROUP_LINES * LINE + 32, part);
            for (int64_t i = 0; i < GROUP_LINES; i++) {
                vf w[LINE_K];
                if (part == 0) fetch(group + i * LINE, i);
                numbers(loadu(group + i * LINE + part * 4 * W), w);
#pragma GCC unroll 8
                for (int j = 0; j < LINE_K; j++) {
                    if (LOW) w[j] = GROUPED ? fma(w[j], scale, low) : w[j] + low;
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++)
                        sums[j % S][m] = fma(w[j], splat(xg[(i * LINE_K + j) * M + m]), sums[j % S][m]);
                }
            }
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
                for (int s = 1; s < S; s++) sums[0][m] += sums[s][m];
                total[m] = GROUPED && !LOW ? fma(sums[0][m], scale, total[m]) : total[m] + sums[0][m];
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) storef(out[m] + part * W, total[m]);
    }
}
"""

INTEGER_TEXT = r"""
#if defined(INTEGER)
// A block: for each step, four k's and row the lower seven bits of four integers and then the higher; behind all
// steps, for each step and row, what an integer is worth, the sum of the integers, and that sum's worth.
#define STEP_WORDS (LIMBS * STEP / 4)
INLINE int64_t steps_of(int64_t k) { return groups_of(k) * STEPS; }
INLINE int64_t integer_stride(int64_t k) { return steps_of(k) * (STEP_WORDS + 3); }

static void prepare_step(const elem* from, int64_t n, float top, float* words, float* facts, int64_t rows,
                         int64_t steps) {
    int32_t whole[STEP], added = 0;
    int8_t bytes[LIMBS][STEP];
    float worth = integers(from, n, top, LIMBS == 2 ? 16319.0f : 127.0f, whole);
    for (int i = 0; i < STEP; i++) {
        int32_t lower = LIMBS == 2 ? ((whole[i] + 64) & 127) - 64 : whole[i];
        bytes[0][i] = (int8_t)lower;
        if (LIMBS == 2) bytes[LIMBS - 1][i] = (int8_t)((whole[i] - lower) >> 7);
        added += whole[i];
    }
    for (int i = 0; i < STEP / 4; i++)
        for (int limb = 0; limb < LIMBS; limb++) memcpy(words + i * rows * LIMBS + limb, bytes[limb] + 4 * i, 4);
    facts[0] = worth;
    memcpy(facts + steps * rows, &added, 4);
    facts[2 * steps * rows] = (float)added * worth;
}

// False where a number is not finite.
static bool prepare_integers(const elem* from, int64_t k, float* x, int64_t row, int64_t rows) {
    int64_t steps = steps_of(k);
    for (int64_t s = 0; s < steps; s++) {
        int64_t left = k - s * STEP, n = left < 0 ? 0 : left < STEP ? left : STEP;
        float top = largest(from + s * STEP, n);
        if (!(top < INFINITY)) return false;
        prepare_step(from + s * STEP, n, top, x + s * STEP_WORDS * rows + row * LIMBS,
                     x + steps * STEP_WORDS * rows + s * rows + row, rows, steps);
    }
    return true;
}

// sum += the four products of a word's bytes, weights without a sign, activations with one
INLINE vi dot4(vi sum, vu weights, const float* x) {
    int32_t word;
    memcpy(&word, x, 4);
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(word));
}

template <int M> static void integer_sums(const uint8_t* unit, const float* x, int64_t k, float (*out)[UNIT]) {
    const uint8_t* end = factors_of(unit, k);
    int64_t steps = steps_of(k) * M;
    const float* worth = x + steps * STEP_WORDS;
    vf total[M] = {}, low = LOW && !GROUPED ? loadf(end + 64) : splat(0.0f);
    for (const uint8_t* group = unit; group < end; group += GROUP_BYTES) {
        vf scaled[M] = {};
        if (GROUPED && LOW) low = scales_at(group + GROUP_LINES * LINE + 32, 0);
        for (int step = 0; step < STEPS; step++, x += STEP_WORDS * M, worth += M) {
            vi sums[M][LIMBS] = {};
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                int32_t sum;
                memcpy(&sum, worth + steps + m, 4);
#if defined(INT8)
                sums[m][0] = (vi)splatu((uint32_t)(-128 * sum));
#elif !LOW
                sums[m][0] = (vi)splatu((uint32_t)(-8 * sum));
#else
                (void)sum;
#endif
            }
            for (int i = 0; i < STEP_LINES; i++) {
                const uint8_t* line = group + (step * STEP_LINES + i) * LINE;
                fetch(line, i);
#if defined(INT8)
                vu words[1] = {loadu(line) ^ splatu(0x80808080u)};
#else
                vu both = loadu(line), words[2] = {both & splatu(0x0f0f0f0fu), both >> 4 & splatu(0x0f0f0f0fu)};
#endif
#pragma GCC unroll 2
                for (int j = 0; j < LINE_K / 4; j++)
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                        for (int limb = 0; limb < LIMBS; limb++)
                            sums[m][limb] = dot4(sums[m][limb], words[j],
                                                 x + ((i * LINE_K / 4 + j) * M + m) * LIMBS + limb);
            }
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                vi sum = LIMBS == 2 ? sums[m][0] + (sums[m][LIMBS - 1] << 7) : sums[m][0];
                scaled[m] = fma(as_floats(sum), splat(worth[m]), scaled[m]);
                if (LOW) total[m] = fma(low, splat(worth[2 * steps + m]), total[m]);
            }
        }
        vf scale = GROUPED ? scales_at(group + GROUP_LINES * LINE, 0) : splat(1.0f);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) total[m] = GROUPED ? fma(scaled[m], scale, total[m]) : total[m] + scaled[m];
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) storef(out[m], total[m]);
}
#endif
"""

PAIRS_TEXT = r"""
#if defined(PAIRS)
// A row of bf16 with zeros up to a whole group: two words for each four k's, `rows` of these side by side. A word
// meets two bytes of a weight's word, whose bytes are k = 0, 2, 1, 3: the first two, or those at even places.
static void prepare_pairs(const elem* from, int64_t k, float* x, int64_t rows) {
    for (int64_t at = 0; at < groups_of(k) * GROUP; at += 4, x += 2 * rows) {
        elem four[4] = {};
        if (at < k) memcpy(four, from + at, 2 * (k - at < 4 ? k - at : 4));
#if defined(__AVX512VBMI__)
        elem one = four[1];
        four[1] = four[2];
        four[2] = one;
#endif
        memcpy(x, four, 8);
    }
}

#if defined(__AVX512VBMI__)
// The upper byte of each size's bf16; the lower one is the byte's own bits where the exponent's is not zero.
struct Bytes { __m512i low0, low1, high0, high1; };
static Bytes tables() {
    uint8_t low[128], high[128];
    for (int i = 0; i < 128; i++) {
        float value = i < 8 ? (float)i * 0.001953125f : 0.0f;  // units of 2^-9, else the exponent's bias is another
        uint32_t bits = (uint32_t)(i << 4) + (120u << 7) << 16;
        if (i < 8) memcpy(&bits, &value, 4);
        low[i] = (uint8_t)(bits >> 16);
        high[i] = (uint8_t)(bits >> 24);
    }
    return {_mm512_loadu_si512(low), _mm512_loadu_si512(low + 64), _mm512_loadu_si512(high),
            _mm512_loadu_si512(high + 64)};
}

// A line as bf16, exactly. first: of each four rows the first two, a word for each two k's; second: the other two.
INLINE void pairs(const Bytes& t, vu line, vu& first, vu& second) {
    __m512i b = (__m512i)line, low = _mm512_permutex2var_epi8(t.low0, b, t.low1);
    __m512i high = _mm512_permutex2var_epi8(t.high0, b, t.high1);
    high = _mm512_ternarylogic_epi32(high, b, _mm512_set1_epi8((char)0x80), 0xf8);  // high | (b & 0x80)
    first = (vu)_mm512_unpacklo_epi8(low, high);
    second = (vu)_mm512_unpackhi_epi8(low, high);
}
INLINE vf words_for(const float* x, int) {
    int64_t both;
    memcpy(&both, x, 8);
    return (vf)_mm512_set1_epi64(both);
}
// Sums of first and second to a sum a row.
INLINE vf by_row(vf a, vf b) {
    return (vf)_mm512_add_ps(_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88),
                             _mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd));
}
#else
struct Bytes {};
static Bytes tables() { return {}; }
// Bytes 0 and 2 of each word as a pair of bf16, exactly: the exponent's bias is another, and what is too small for
// its range (below 2^-6) comes from a table.
INLINE vu as_pair(vu bytes) {
    static const uint16_t tiny[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    __m512i b = (__m512i)bytes;
    __m512i size = _mm512_and_si512(b, _mm512_set1_epi16(0x7f));
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    __mmask32 small = _mm512_testn_epi16_mask(b, _mm512_set1_epi16(0x78));
    value = _mm512_mask_permutexvar_epi16(value, small, b, _mm512_loadu_si512(tiny));
    return (vu)value | (bytes << 8 & splatu(0x80008000u));
}
INLINE void pairs(const Bytes&, vu line, vu& first, vu& second) {
    first = as_pair(line & splatu(0x00ff00ffu));
    second = as_pair(line >> 8 & splatu(0x00ff00ffu));
}
INLINE vf words_for(const float* x, int half) { return splat(x[half]); }
INLINE vf by_row(vf a, vf b) { return a + b; }
#endif

template <int M> static void pair_sums(const uint8_t* unit, const float* x, int64_t k, float (*out)[UNIT]) {
    const uint8_t* end = factors_of(unit, k);
    const Bytes table = tables();
    vf total[M] = {}, ahead[2][M] = {};
    for (const uint8_t* group = unit; group < end; group += GROUP_BYTES) {
        vf sums[2][M] = {};
        for (int64_t i = 0; i < GROUP_LINES; i++, x += 2 * M) {
            vu first, second;
            fetch(group + i * LINE, i);
            pairs(table, loadu(group + i * LINE), first, second);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                sums[0][m] = dot2(first, (vu)words_for(x + 2 * m, 0), sums[0][m]);
                sums[1][m] = dot2(second, (vu)words_for(x + 2 * m, 1), sums[1][m]);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            if (GROUPED)
                total[m] = fma(by_row(sums[0][m], sums[1][m]), scales_at(group + GROUP_LINES * LINE, 0), total[m]);
            else
                for (int half = 0; half < 2; half++) ahead[half][m] += sums[half][m];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) storef(out[m], GROUPED ? total[m] : by_row(ahead[0][m], ahead[1][m]));
}
#endif
"""
