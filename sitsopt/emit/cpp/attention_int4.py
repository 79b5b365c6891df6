"""C++ text: scores and weighted sums over packed int4 tiles by 8-bit dot products (VNNI), for heads of 64 and 128.

Nothing is unpacked to floats. A tile's key scales are folded into the query, its value scales into the weights; both
are rounded to 8-bit integers, by a unit of their own for each row and tile. What rounding loses is made up for the
mean of a nibble, 7.5, so that only its spread is seen: about a sixth of what int4 itself loses (root mean square,
normal keys with an outlier channel). The lows of keys give one number a row and tile, those of values one number a
row. Not for f32, where a rewrite may change the order of a sum and nothing else.
"""

from __future__ import annotations

INT4_TEXT = r"""
#if ROUNDED && BITS == 4 && HD == VD && (HD == 64 || HD == 128) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DOTS 1
#define GROUP (512 / HD)         // tokens whose values one dot product adds up: 4 in every lane
#define LEVELS 127.0f
#define MEAN 7.5f                // of a nibble
#define ROWS4 3                  // query rows that share a pass over bytes
#define LONG (BATCH * TILE)      // scores of a row over the tiles that share a softmax step
typedef __m512i vb;

INLINE __m512 halves(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vb low_nibbles(vb x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
// sum += the products of 4 unsigned and 4 signed bytes, in each lane. Compilers copy the sum when they are given the
// intrinsic.
INLINE void dot4(vb& sum, vb a, const vb& b) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b)); }
INLINE vb high_nibbles(vb x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }

// A query in 8 bits for the channels in the low and in the high nibbles of a vector of bytes.
struct Query4 { vb low[4], high[4]; float unit, constant; };  // dword j of each 128 bits, four times

INLINE void each_dword(vb x, vb* out) {
    out[0] = _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0x00), out[1] = _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0x55);
    out[2] = _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0xaa), out[3] = _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0xff);
}

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
        vb low = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)parts));
        vb high = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)(parts + 32)));
#else
        vb low = _mm512_load_si512(parts), high = _mm512_load_si512(parts + 64);
#endif
        each_dword(low, out[r].low);
        each_dword(high, out[r].high);
    }
}

INLINE vb add_lanes(vb a, vb b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// The dwords of four vectors, turned in each 128 bits: keys of four vectors become lanes.
INLINE void turn(const uint8_t* k, vb* y) {
    vb x0 = _mm512_loadu_si512(k), x1 = _mm512_loadu_si512(k + 64);
    vb x2 = _mm512_loadu_si512(k + 128), x3 = _mm512_loadu_si512(k + 192);
    vb a = _mm512_unpacklo_epi32(x0, x1), b = _mm512_unpacklo_epi32(x2, x3);
    vb c = _mm512_unpackhi_epi32(x0, x1), d = _mm512_unpackhi_epi32(x2, x3);
    y[0] = _mm512_unpacklo_epi64(a, b), y[1] = _mm512_unpackhi_epi64(a, b);
    y[2] = _mm512_unpacklo_epi64(c, d), y[3] = _mm512_unpackhi_epi64(c, d);
}

// Scores of RB rows, LONG apart, against the 64 keys of a tile; meanwhile the keys at `ahead` are fetched, if any.
template <int RB>
static void score4(const float* rows, const uint16_t* scales, const uint16_t* lows, const uint8_t* k, const uint8_t* ahead,
                   float* s) {
    Query4 q[RB];
    fold_queries<RB>(rows, scales, lows, q);
    for (int block = 0; block < 4; block++) {
        vb t[RB][HD / 32];
#pragma GCC unroll 4
        for (int i = 0; i < HD / 32; i++, k += 256) {
            vb y[4];
            turn(k, y);
            if (ahead)
#pragma GCC unroll 4
                for (int line = 0; line < 4; line++, ahead += 64) fetch(ahead);
#pragma GCC unroll 3
            for (int r = 0; r < RB; r++) t[r][i] = _mm512_setzero_si512();
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                vb a = low_nibbles(y[j]), b = high_nibbles(y[j]);
#pragma GCC unroll 3
                for (int r = 0; r < RB; r++) {
                    dot4(t[r][i], a, q[r].low[j]);
                    dot4(t[r][i], b, q[r].high[j]);
                }
            }
        }
#pragma GCC unroll 3
        for (int r = 0; r < RB; r++) {
#if HD == 64
            const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
            vb all = _mm512_permutexvar_epi32(order, add_lanes(t[r][0], t[r][1]));
#else
            vb all = add_lanes(add_lanes(t[r][0], t[r][1]), add_lanes(t[r][2], t[r][3]));
#endif
            __m512 wide = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), _mm512_set1_ps(q[r].unit), _mm512_set1_ps(q[r].constant));
            _mm512_storeu_ps(s + r * LONG + 16 * block, wide);
        }
    }
}

// One softmax step of a row over `count` tiles: scores become weights, `sums` what each tile got of them; returns what
// older sums shrink by. bias: of each tile, or null where all of it is open.
INLINE float soften4(float* s, int count, const float* const* bias, float scale, float cap, float& m, float& l, float* sums) {
    vf peak = splat(-INFINITY);
    for (int t = 0; t < count; t++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            float* at = s + t * TILE + 16 * i;
            vf x = loadf(at) * splat(scale);
            if (cap != 0.0f) x = tanh(x / splat(cap)) * splat(cap);
            if (bias[t]) x += loadf(bias[t] + 16 * i);
            storef(at, x);
            peak = max(x, peak);  // a NaN score is passed over here and shows in l
        }
    float high = top(peak), old = m, all = 0.0f;
    m = high > m ? high : m;
    float base = m == -INFINITY ? 0.0f : m;
    for (int t = 0; t < count; t++) {
        vf total = {};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            float* at = s + t * TILE + 16 * i;
            vf x = exp(loadf(at) - splat(base));
            storef(at, x);
            total += x;
        }
        all += sums[t] = sum(total);
    }
    float alpha = old == m && m > -INFINITY && m < INFINITY ? 1.0f : exp1(old - base);
    l = l * alpha + all;
    return alpha;
}

// The packed values of a tile, and those that are fetched meanwhile, if any.
struct Packed4 { const uint8_t* q; const uint16_t *scales, *lows; const uint8_t* ahead; };

// The weights of a row in 8 bits, and what one is worth. The lows of the values are added to `lows`.
INLINE float fold_weights(float* s, const Packed4* v, int count, float alpha, int8_t* parts, float& lows) {
    __m512 sum = _mm512_setzero_ps(), most = _mm512_setzero_ps(), lost = _mm512_setzero_ps();
    for (int t = 0; t < count; t++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            float* at = s + t * TILE + 16 * i;
            __m512 p = _mm512_loadu_ps(at), w = _mm512_mul_ps(p, halves(v[t].scales + 16 * i));
            sum = _mm512_fmadd_ps(p, halves(v[t].lows + 16 * i), sum);
            most = _mm512_max_ps(most, w);
            _mm512_storeu_ps(at, w);
        }
    float top = _mm512_reduce_max_ps(most), unit = top / LEVELS;
    __m512 inverse = _mm512_set1_ps(top > 0.0f ? LEVELS / top : 0.0f);
    for (int i = 0; i < 4 * count; i++) {
        __m512 w = _mm512_loadu_ps(s + 16 * i);
        __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(w, inverse));
        __m128i bytes = _mm512_cvtepi32_epi8(rounded);
#if HD == 64  // a vector holds two tokens: even ones below, odd ones above
        bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
#endif
        _mm_store_si128((__m128i*)(parts + 16 * i), bytes);
        lost = _mm512_add_ps(lost, _mm512_fnmadd_ps(_mm512_cvtepi32_ps(rounded), _mm512_set1_ps(unit), w));
    }
    lows = lows * alpha + _mm512_reduce_add_ps(_mm512_fmadd_ps(lost, _mm512_set1_ps(MEAN), sum));
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

// o [RB][8][16] = o * alpha + the weighted sum of the values of `count` tiles without their lows.
template <int RB>
static void mix4(float* s, const Packed4* v, int count, const float* alpha, float* o, float* lows) {
    alignas(64) int8_t parts[RB][LONG];
    float unit[RB];
    for (int r = 0; r < RB; r++) unit[r] = fold_weights(s + r * LONG, v, count, alpha[r], parts[r], lows[r]);
    __m512i acc[RB][8];
#pragma GCC unroll 3
    for (int r = 0; r < RB; r++)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) acc[r][i] = _mm512_setzero_si512();
    for (int n = 0; n < count * TILE / GROUP; n++) {
        const Packed4& tile = v[n / (TILE / GROUP)];
        int64_t at = n % (TILE / GROUP) * 256;
        const uint8_t* q = tile.q + at;
        if (tile.ahead)
#pragma GCC unroll 4
            for (int line = 0; line < 4; line++) fetch(tile.ahead + at + 64 * line);
        vb w[RB];
#pragma GCC unroll 3
        for (int r = 0; r < RB; r++) w[r] = group_weights(parts[r], n);
        vb x0 = _mm512_loadu_si512(q), x1 = _mm512_loadu_si512(q + 64);
        vb x2 = _mm512_loadu_si512(q + 128), x3 = _mm512_loadu_si512(q + 192);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {  // bytes of the same channels of four tokens next to each other
            vb a = half ? _mm512_unpackhi_epi8(x0, x1) : _mm512_unpacklo_epi8(x0, x1);
            vb b = half ? _mm512_unpackhi_epi8(x2, x3) : _mm512_unpacklo_epi8(x2, x3);
            vb y[2] = {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                vb under = low_nibbles(y[i]), over = high_nibbles(y[i]);
#pragma GCC unroll 3
                for (int r = 0; r < RB; r++) {
                    dot4(acc[r][2 * half + i], under, w[r]);
                    dot4(acc[r][4 + 2 * half + i], over, w[r]);
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

typedef void (*Score4Fn)(const float*, const uint16_t*, const uint16_t*, const uint8_t*, const uint8_t*, float*);
typedef void (*Mix4Fn)(float*, const Packed4*, int, const float*, float*, float*);
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
