"""C++ text: packed tiles of keys and values to elements, as `graph/kv/packing.py` packed them."""

from __future__ import annotations

UNPACK_TEXT = r"""
#if BITS == 4
#define KB (HD / 2)  // bytes of a token's key
#define VB (VD / 2)
#else
#define KB HD
#define VB VD
#endif

// One element, without a branch, so that loops over it become vectors; what is packed is never NaN.
INLINE elem put(float x) {
#if WORD_ELEMS == 1
    return x;
#elif defined(BF16)
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (elem)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#else
    return narrow(x);
#endif
}

// Keys share a scale by channel, over the 64 tokens.
static void unpack_keys(const uint8_t* q, const uint16_t* scales, const uint16_t* lows, elem* out) {
    float scale[HD], low[HD] = {};
    for (int i = 0; i < HD; i++) scale[i] = from_f16(scales[i]);
#if BITS == 4
    for (int i = 0; i < HD; i++) low[i] = from_f16(lows[i]);
    for (int j = 0; j < TILE; j++, q += KB, out += HD)
        for (int i = 0; i < KB; i++) {
            out[i] = put((float)(q[i] & 15) * scale[i] + low[i]);
            out[KB + i] = put((float)(q[i] >> 4) * scale[KB + i] + low[KB + i]);
        }
#else
    for (int j = 0; j < TILE; j++, q += KB, out += HD)
        for (int i = 0; i < HD; i++) out[i] = put((float)((const int8_t*)q)[i] * scale[i]);
#endif
}

// Values share a scale by token, over its channels.
static void unpack_values(const uint8_t* q, const uint16_t* scales, const uint16_t* lows, elem* out) {
    for (int j = 0; j < TILE; j++, q += VB, out += VD) {
        float scale = from_f16(scales[j]);
#if BITS == 4
        float low = from_f16(lows[j]);
        for (int i = 0; i < VB; i++) {
            out[i] = put((float)(q[i] & 15) * scale + low);
            out[VB + i] = put((float)(q[i] >> 4) * scale + low);
        }
#else
        for (int i = 0; i < VD; i++) out[i] = put((float)((const int8_t*)q)[i] * scale);
#endif
    }
}
"""
