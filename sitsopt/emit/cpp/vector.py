"""The vector layer of the C++ text: GCC's vector types, with intrinsics where they are worth it.

Everything above it is written once for AVX-512 (16 lanes), AVX2 (8) and whatever else a compiler
knows (4 lanes, which it splits or maps as it likes).
"""

from __future__ import annotations

_TYPES = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
extern "C" int omp_in_parallel(void);
#else
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_in_parallel(void) { return 0; }
#endif

#define INLINE static inline __attribute__((always_inline))
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef float vf_any __attribute__((vector_size(4 * W), aligned(1), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(4 * W), aligned(1), may_alias));

INLINE vf loadf(const void* p) { return *(const vf_any*)p; }
INLINE vu loadu(const void* p) { return *(const vu_any*)p; }
INLINE void storef(void* p, vf x) { *(vf_any*)p = x; }

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}
INLINE float from_f16(uint16_t x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, e = (x >> 10) & 31, m = x & 1023, bits;
    float r = (float)m * 5.9604644775390625e-8f;  // a denormal: units of 2^-24
    memcpy(&bits, &r, 4);
    if (e) bits = ((e == 31 ? 255 : e + 112) << 23) | (m << 13);
    bits |= sign;
    memcpy(&r, &bits, 4);
    return r;
#endif
}

// The first n lanes, the rest zero; reads not a byte more.
INLINE vf loadf_head(const float* p, int n) {
    vf r = {};
    if (n > 0) memcpy(&r, p, 4 * (n < W ? n : W));
    return r;
}
"""

_OPERATIONS = r"""
// max and min give b where either is NaN, on every machine.
#if defined(__AVX512F__)
INLINE vf splat(float x) { return (vf)_mm512_set1_ps(x); }
INLINE vu splatu(uint32_t x) { return (vu)_mm512_set1_epi32((int)x); }
INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE float sum(vf a) { return _mm512_reduce_add_ps((__m512)a); }
INLINE float top(vf a) { return _mm512_reduce_max_ps((__m512)a); }
#elif defined(__AVX2__)
INLINE vf splat(float x) { return (vf)_mm256_set1_ps(x); }
INLINE vu splatu(uint32_t x) { return (vu)_mm256_set1_epi32((int)x); }
INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf splat(float x) { vf r; for (int i = 0; i < W; i++) r[i] = x; return r; }
INLINE vu splatu(uint32_t x) { vu r; for (int i = 0; i < W; i++) r[i] = x; return r; }
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE vf min(vf a, vf b) { return a < b ? a : b; }
#endif
#if !defined(__AVX512F__)
INLINE float sum(vf a) {
    float part[W];
    storef(part, a);
    for (int h = W / 2; h; h /= 2) for (int i = 0; i < h; i++) part[i] += part[i + h];
    return part[0];
}
INLINE float top(vf a) {
    float r = a[0];
    for (int i = 1; i < W; i++) r = a[i] > r ? a[i] : r;
    return r;
}
#endif

// t[i][j] <-> t[j][i]: interleave words, then pairs, then swap quarters.
#if defined(__AVX512F__)
INLINE void transpose(vu t[W]) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)t[i], (__m512i)t[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)t[i], (__m512i)t[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[i] = (vu)_mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        t[i + 8] = (vu)_mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    }
}
#elif defined(__AVX2__)
INLINE void transpose(vu t[W]) {
    __m256i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32((__m256i)t[i], (__m256i)t[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32((__m256i)t[i], (__m256i)t[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = (vu)_mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        t[i + 4] = (vu)_mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}
#else
INLINE void transpose(vu t[W]) {
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            uint32_t swap = t[i][j];
            t[i][j] = t[j][i];
            t[j][i] = swap;
        }
}
#endif
"""

_FUNCTIONS = r"""
// exp to 1.2e-7 relative: 2^n from the exponent bits, the rest on [-ln2/2, ln2/2] by its Taylor series.
// Below exp(-86.6) = 2.5e-38 the result is 0, above f32's range inf; NaN stays NaN.
INLINE vf exp(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    vf c = min(splat(89.0f), max(splat(-87.0f), x));
    vf shifted = fma(c, splat(1.44269504f), magic);
    vf n = shifted - magic;
    vf f = fma(n, splat(-0.693145752f), c);  // c - n ln 2 in two pieces (Cody and Waite)
    f = fma(n, splat(-1.42860677e-6f), f);
    vf p = splat(1.98412698e-4f);
    p = fma(p, f, splat(1.38888889e-3f));
    p = fma(p, f, splat(8.33333333e-3f));
    p = fma(p, f, splat(4.16666667e-2f));
    p = fma(p, f, splat(1.66666667e-1f));
    p = fma(p, f, splat(0.5f));
    p = fma(p, f, splat(1.0f));
    p = fma(p, f, splat(1.0f));
    vi e = (vi)shifted - (vi)magic;
    vf power = (vf)((e + 126) << 23);  // 2^(n-1): 2^128 is no float
    return c < splat(-86.6f) ? splat(0.0f) : p * power * splat(2.0f);
}
INLINE float exp1(float x) { return exp(splat(x))[0]; }

// (1 - e) / (1 + e) with e = exp(-2|x|); near 0, where that cancels, the odd series.
INLINE vf tanh(vf x) {
    vf a = x < splat(0.0f) ? -x : x;
    vf e = exp(a * splat(-2.0f));
    vf big = (splat(1.0f) - e) / (splat(1.0f) + e);
    vf z = a * a;
    vf p = splat(62.0f / 2835.0f);
    p = fma(p, z, splat(-17.0f / 315.0f));
    p = fma(p, z, splat(2.0f / 15.0f));
    p = fma(p, z, splat(-1.0f / 3.0f));
    p = fma(p, z, splat(1.0f));
    vf r = a < splat(0.25f) ? a * p : big;
    return x < splat(0.0f) ? -r : r;
}
"""


def text(lanes: int) -> str:
    """Vector types of `lanes` f32 values, their operations, exp and tanh."""
    return f"#define W {lanes}\n" + _TYPES + _OPERATIONS + _FUNCTIONS
