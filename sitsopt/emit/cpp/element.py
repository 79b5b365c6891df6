"""What differs by dtype in the C++ text: how two vectors are read, where their lanes go, how one value is rounded.

A chunk is 2 W elements. `load2` turns it into two f32 vectors; for bf16 these are the even and the odd
elements (a shift and a mask, no shuffle), so `lane_of` says which element a lane holds.
"""

from __future__ import annotations

_F32 = r"""
typedef float elem;
#define WORD_ELEMS 1
INLINE void load2(const elem* p, vf& a, vf& b) { a = loadf(p); b = loadf(p + W); }
INLINE void load2_head(const elem* p, int n, vf& a, vf& b) {
    a = loadf_head(p, n);
    b = loadf_head(p + W, n - W);
}
INLINE int lane_of(int half, int lane) { return half * W + lane; }
INLINE float widen(elem x) { return x; }
INLINE elem narrow(float x) { return x; }
"""

_BF16 = r"""
#define BF16 1
typedef uint16_t elem;
#define WORD_ELEMS 2
INLINE void split(vu w, vf& a, vf& b) {
    a = (vf)(w << 16);
    b = (vf)(w & splatu(0xffff0000u));
}
INLINE void load2(const elem* p, vf& a, vf& b) { split(loadu(p), a, b); }
INLINE void load2_head(const elem* p, int n, vf& a, vf& b) {
    vu w = {};
    if (n > 0) memcpy(&w, p, 2 * (n < 2 * W ? n : 2 * W));
    split(w, a, b);
}
INLINE int lane_of(int half, int lane) { return 2 * lane + half; }
INLINE float widen(elem x) { return from_bf16(x); }
INLINE elem narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (elem)(x == x ? even : (bits >> 16) | 0x40);  // NaN stays a quiet NaN
}
#if defined(__AVX512BF16__)
#define DOT2 1
// acc += a.even * b.even + a.odd * b.odd, in f32; denormal inputs count as zero
INLINE vf dot2(vu a, vu b, vf acc) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
INLINE vu pack2(vf a, vf b) { return (vu)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }
// Pairs (a, b) element by element; within each 128 bits the lower four, or the higher.
INLINE vu zip_low(vu a, vu b) { return (vu)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
INLINE vu zip_high(vu a, vu b) { return (vu)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
INLINE int lane_of_zip(int half, int lane) { return 8 * (lane / 4) + 4 * half + lane % 4; }
// The first n < 2 W elements, the rest zero.
INLINE vu words_head(const elem* p, int n) {
    return (vu)_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
}
#endif
"""

_F16 = r"""
typedef uint16_t elem;
#define WORD_ELEMS 2
#if defined(__AVX512F__)
INLINE vf widen_vector(const void* p) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
INLINE void split(vu w, vf& a, vf& b) {
    a = (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)w));
    b = (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(w >> 16)));
}
#elif defined(__AVX2__)
INLINE vf widen_vector(const void* p) {
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
INLINE __m128i low_halves(__m256i w) {
    w = _mm256_permute4x64_epi64(_mm256_packus_epi32(w, w), 0xd8);
    return _mm256_castsi256_si128(w);
}
INLINE void split(vu w, vf& a, vf& b) {
    a = (vf)_mm256_cvtph_ps(low_halves((__m256i)(w & splatu(0xffffu))));
    b = (vf)_mm256_cvtph_ps(low_halves((__m256i)(w >> 16)));
}
#endif
INLINE float widen(elem x) { return from_f16(x); }
INLINE elem narrow(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    elem sign = (elem)((bits >> 16) & 0x8000);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7e00;
    if (bits >= 0x477ff000u) return sign | 0x7c00;  // rounds to 65536 or more
    if (bits < 0x38800000u) {                        // below 2^-14: a denormal
        float scaled;
        memcpy(&scaled, &bits, 4);
        scaled += 0.5f;  // the sum's last bit is 2^-24, a denormal's unit, and it rounds to even
        memcpy(&bits, &scaled, 4);
        return sign | (elem)(bits - 0x3f000000u);
    }
    bits += 0xfff + ((bits >> 13) & 1) - (112u << 23);
    return sign | (elem)(bits >> 13);
#endif
}
#if !defined(__AVX2__)
INLINE vf widen_vector(const void* p) {
    vf r;
    for (int i = 0; i < W; i++) r[i] = widen(((const elem*)p)[i]);
    return r;
}
INLINE void split(vu w, vf& a, vf& b) {
    for (int i = 0; i < W; i++) {
        a[i] = widen((elem)w[i]);
        b[i] = widen((elem)(w[i] >> 16));
    }
}
#endif
INLINE void load2(const elem* p, vf& a, vf& b) { a = widen_vector(p); b = widen_vector(p + W); }
INLINE void load2_head(const elem* p, int n, vf& a, vf& b) {
    elem part[2 * W] = {};
    if (n > 0) memcpy(part, p, 2 * (n < 2 * W ? n : 2 * W));
    load2(part, a, b);
}
INLINE int lane_of(int half, int lane) { return half * W + lane; }
"""

_TEXTS = {"f32": _F32, "bf16": _BF16, "f16": _F16}


def text(dtype: str) -> str:
    """Loads, stores and conversions of one dtype; needs the vector layer before it."""
    return _TEXTS[dtype]
