"""C++ text: quantized weights as a plain matrix again, rounded once: for inputs with many rows."""

from __future__ import annotations

UNPACK_TEXT = r"""
#define TILE (W > LINE_K ? W : LINE_K)

// TILE k's from `from` on, of W rows, in f32 and with every scale: a vector for each k.
static void unpack_tile(const uint8_t* unit, const uint8_t* end, int64_t from, int part, vu* tile) {
    vf factor = loadf(end + part * 4 * W);
    for (int i = 0; i < TILE; i += LINE_K) {
        const uint8_t* group = unit + (from + i) / GROUP * GROUP_BYTES;
        vf w[LINE_K], scale = splat(1.0f), low = splat(0.0f);
        if (group >= end) return;
        if (!GROUPED && LOW) low = loadf(end + 64 + part * 4 * W);
        if (GROUPED) scale = scales_at(group + GROUP_LINES * LINE, part);
        if (GROUPED && LOW) low = scales_at(group + GROUP_LINES * LINE + 32, part);
        numbers(loadu(group + (from + i) % GROUP / LINE_K * LINE + part * 4 * W), w);
        for (int j = 0; j < LINE_K; j++)
            tile[i + j] = (vu)((GROUPED && LOW ? fma(w[j], scale, low) : GROUPED ? w[j] * scale : w[j] + low) * factor);
    }
}

static void unpack_unit(const uint8_t* unit, int64_t k, int64_t rows, elem* out, int64_t ldo) {
    const uint8_t* end = factors_of(unit, k);
    for (int64_t from = 0; from < k; from += TILE)
        for (int part = 0; part < PARTS && part * W < rows; part++) {
            vu tile[TILE] = {};
            unpack_tile(unit, end, from, part, tile);
            for (int64_t at = from; at < from + TILE && at < k; at += W) {
                vu* square = tile + (at - from);
                int64_t n = k - at < W ? k - at : W;
                transpose(square);
                for (int i = 0; i < W && part * W + i < rows; i++) {
                    elem rounded[W];
                    for (int j = 0; j < W; j++) rounded[j] = narrow(((vf)square[i])[j]);
                    memcpy(out + (part * W + i) * ldo + at, rounded, n * sizeof(elem));
                }
            }
        }
}

// out: [n, k] with rows ldo apart.
extern "C" int UNPACK_SYMBOL(const uint8_t* packed, int64_t unit_bytes, int64_t n, int64_t k, void* out, int64_t ldo,
                             int32_t threads) {
    int64_t units = (n + UNIT - 1) / UNIT;
#pragma omp parallel for num_threads(threads) if (threads > 1 && units * unit_bytes > SHARE)
    for (int64_t u = 0; u < units; u++)
        unpack_unit(packed + u * unit_bytes, k, n - u * UNIT < UNIT ? n - u * UNIT : UNIT,
                    (elem*)out + u * UNIT * ldo, ldo);
    return 0;
}
"""
