"""C++ text: scores and weighted sums over packed int4 tiles by 8-bit dot products (VNNI), for heads of 64 and 128.

Nothing is unpacked to floats. A tile's key scales are folded into the query, its value scales into the weights; both
are rounded to 8-bit integers, by a unit of their own for each row and tile. What rounding loses is made up for the
mean of a nibble, 7.5, so that only its spread is seen: a tenth of what int4 itself loses. The lows of keys give one
number a row and tile, those of values one number a row.
"""

from __future__ import annotations

INT4_TEXT = r"""
#if BITS == 4 && HD == VD && (HD == 64 || HD == 128) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DOTS 1
#define GROUP (512 / HD)         // tokens whose values one dot product adds up: 4 in every lane
#define LEVELS 127.0f
#define MEAN 7.5f                // of a nibble
#define ROWS4 3                  // query rows that share a pass over bytes
typedef __m512i vb;

INLINE __m512 halves(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vb low_nibbles(vb x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE vb high_nibbles(vb x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }

// A query in 8 bits for the channels in the low and in the high nibbles of a vector of bytes.
struct Query4 { vb low, high; float unit, constant; };

template <int RB>
INLINE void fold_queries(const float* q, const uint16_t* scales, const uint16_t* lows, Query4* out) {
    __m512 scale[HD / 16], low[HD / 16];
#pragma GCC unroll 8
    for (int i = 0; i < HD / 16; i++) scale[i] = halves(scales + 16 * i), low[i] = halves(lows + 16 * i);
#pragma GCC unroll 3
    for (int r = 0; r < RB; r++) {
        __m512 x[HD / 16], sum = _mm512_setzero_ps(), most = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int i = 0; i < HD / 16; i++) {
            __m512 wide = _mm512_loadu_ps(q + r * HD + 16 * i);
            sum = _mm512_fmadd_ps(wide, low[i], sum);
            x[i] = _mm512_mul_ps(wide, scale[i]);
            most = _mm512_max_ps(most, _mm512_abs_ps(x[i]));
        }
        float top = _mm512_reduce_max_ps(most), unit = top / LEVELS;
        __m512 inverse = _mm512_set1_ps(top > 0.0f ? LEVELS / top : 0.0f), lost = _mm512_setzero_ps();
        alignas(64) int8_t parts[HD];
#pragma GCC unroll 8
        for (int i = 0; i < HD / 16; i++) {
            __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], inverse));
            _mm_store_si128((__m128i*)(parts + 16 * i), _mm512_cvtepi32_epi8(rounded));
            lost = _mm512_add_ps(lost, _mm512_fnmadd_ps(_mm512_cvtepi32_ps(rounded), _mm512_set1_ps(unit), x[i]));
        }
        out[r].unit = unit;
        out[r].constant = _mm512_reduce_add_ps(_mm512_fmadd_ps(lost, _mm512_set1_ps(MEAN), sum));
#if HD == 64
        out[r].low = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)parts));
        out[r].high = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)(parts + 32)));
#else
        out[r].low = _mm512_load_si512(parts);
        out[r].high = _mm512_load_si512(parts + 64);
#endif
    }
}

// Sums of neighbours; a sum of 16 products of a nibble and 7 bits fits into 16.
INLINE __m512i add_near(__m512i a, __m512i b) {
    return _mm512_madd_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(1));
}
INLINE __m512i add_lanes(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}
// Sums of four vectors, in each 128 bits.
INLINE __m512i sums4(const __m512i* t) { return add_near(add_near(t[0], t[1]), add_near(t[2], t[3])); }

// Scores of RB rows against the 64 keys of a tile.
template <int RB>
static void score4(const float* rows, const uint16_t* scales, const uint16_t* lows, const uint8_t* k, float* s) {
    Query4 q[RB];
    fold_queries<RB>(rows, scales, lows, q);
    for (int block = 0; block < 4; block++, k += 16 * KB) {
        __m512i t[RB][16 * KB / 64];
#pragma GCC unroll 16
        for (int i = 0; i < 16 * KB / 64; i++) {
            vb x = _mm512_loadu_si512(k + 64 * i), a = low_nibbles(x), b = high_nibbles(x);
#pragma GCC unroll 3
            for (int r = 0; r < RB; r++)
                t[r][i] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), a, q[r].low), b, q[r].high);
        }
#pragma GCC unroll 3
        for (int r = 0; r < RB; r++) {
#if HD == 64
            const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
            __m512i all = _mm512_permutexvar_epi32(order, add_lanes(sums4(t[r]), sums4(t[r] + 4)));
#else
            __m512i all = add_lanes(add_lanes(sums4(t[r]), sums4(t[r] + 4)), add_lanes(sums4(t[r] + 8), sums4(t[r] + 12)));
#endif
            __m512 wide = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), _mm512_set1_ps(q[r].unit), _mm512_set1_ps(q[r].constant));
            _mm512_storeu_ps(s + r * TILE + 16 * block, wide);
        }
    }
}

INLINE __m512 weights16(const float* s, int i) {
#if defined(DOT2)
    __m256i w = _mm256_loadu_si256((const __m256i*)((const uint16_t*)s + 16 * i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(w), 16));
#else
    return _mm512_loadu_ps(s + 16 * i);
#endif
}

// The weights of a row in 8 bits, and what one is worth. The lows of the values are added to `lows`.
INLINE float fold_weights(const float* s, const __m512* scale, const __m512* low, float alpha, int8_t* parts, float& lows) {
    __m512 w[4], sum = _mm512_setzero_ps(), most = _mm512_setzero_ps(), lost = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 p = weights16(s, i);
        sum = _mm512_fmadd_ps(p, low[i], sum);
        w[i] = _mm512_mul_ps(p, scale[i]);
        most = _mm512_max_ps(most, w[i]);
    }
    float top = _mm512_reduce_max_ps(most), unit = top / LEVELS;
    __m512 inverse = _mm512_set1_ps(top > 0.0f ? LEVELS / top : 0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(w[i], inverse));
        _mm_store_si128((__m128i*)(parts + 16 * i), _mm512_cvtepi32_epi8(rounded));
        lost = _mm512_add_ps(lost, _mm512_fnmadd_ps(_mm512_cvtepi32_ps(rounded), _mm512_set1_ps(unit), w[i]));
    }
    lows = lows * alpha + _mm512_reduce_add_ps(_mm512_fmadd_ps(lost, _mm512_set1_ps(MEAN), sum));
#if HD == 64  // a vector holds two tokens: even ones below, odd ones above
    const __m512i apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    _mm512_store_si512(parts, _mm512_shuffle_epi8(_mm512_load_si512(parts), apart));
#endif
    return unit;
}

// The weights of a group of tokens, each beside the others' of its four.
INLINE vb group_weights(const int8_t* parts, int g) {
#if HD == 64
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    int64_t both;
    memcpy(&both, parts + 8 * g, 8);
    return _mm512_permutexvar_epi32(spread, _mm512_set1_epi64(both));
#else
    int32_t four;
    memcpy(&four, parts + 4 * g, 4);
    return _mm512_set1_epi32(four);
#endif
}

// o [RB][8][16] = o * alpha + the weighted sum of a tile's values without their lows.
template <int RB>
static void mix4(const float* s, const uint8_t* v, const uint16_t* scales, const uint16_t* low, const float* alpha,
                 float* o, float* lows) {
    alignas(64) int8_t parts[RB][TILE];
    float unit[RB];
    __m512 scale[4], least[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) scale[i] = halves(scales + 16 * i), least[i] = halves(low + 16 * i);
#pragma GCC unroll 3
    for (int r = 0; r < RB; r++) unit[r] = fold_weights(s + r * TILE, scale, least, alpha[r], parts[r], lows[r]);
    __m512i acc[RB][8];
#pragma GCC unroll 3
    for (int r = 0; r < RB; r++)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) acc[r][i] = _mm512_setzero_si512();
    for (int g = 0; g < TILE / GROUP; g++, v += 256) {
        vb w[RB];
#pragma GCC unroll 3
        for (int r = 0; r < RB; r++) w[r] = group_weights(parts[r], g);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {  // bytes of the same channels of four tokens next to each other
            vb x0 = _mm512_loadu_si512(v), x1 = _mm512_loadu_si512(v + 64);
            vb x2 = _mm512_loadu_si512(v + 128), x3 = _mm512_loadu_si512(v + 192);
            vb a = half ? _mm512_unpackhi_epi8(x0, x1) : _mm512_unpacklo_epi8(x0, x1);
            vb b = half ? _mm512_unpackhi_epi8(x2, x3) : _mm512_unpacklo_epi8(x2, x3);
            vb y[2] = {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                vb under = low_nibbles(y[i]), over = high_nibbles(y[i]);
#pragma GCC unroll 3
                for (int r = 0; r < RB; r++) {
                    acc[r][2 * half + i] = _mm512_dpbusd_epi32(acc[r][2 * half + i], under, w[r]);
                    acc[r][4 + 2 * half + i] = _mm512_dpbusd_epi32(acc[r][4 + 2 * half + i], over, w[r]);
                }
            }
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < RB; r++)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            float* to = o + r * 128 + 16 * i;
            __m512 old = _mm512_mul_ps(_mm512_loadu_ps(to), _mm512_set1_ps(alpha[r]));
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][i]), _mm512_set1_ps(unit[r]), old));
        }
}

typedef void (*Score4Fn)(const float*, const uint16_t*, const uint16_t*, const uint8_t*, float*);
typedef void (*Mix4Fn)(const float*, const uint8_t*, const uint16_t*, const uint16_t*, const float*, float*, float*);
static const Score4Fn SCORE4[ROWS4] = {score4<1>, score4<2>, score4<3>};
static const Mix4Fn MIX4[ROWS4] = {mix4<1>, mix4<2>, mix4<3>};

// Adds what mix4 summed up to a row's accumulators, which lie as load_values has them.
static void add_mixed(const float* o4, float lows, float* o) {
    float flat[VP] = {};
    for (int nibble = 0; nibble < 2; nibble++)
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 16; i++)  // byte 16 * (128 bits) + 4 j + dword
                flat[nibble * VB + (i / 4 * 16 + 4 * j + i % 4) % VB] += o4[(4 * nibble + j) * 16 + i];
    for (int c = 0; c < VP / CHUNK; c++)
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < W; i++)
                o[c * CHUNK + half * W + i] += flat[c * CHUNK + OUT_LANE(half, i)] + lows;
}
#endif
"""
