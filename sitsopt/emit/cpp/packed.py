"""C++ text: a few rows of activations times quantized weights.

Weights lie in units of 16 rows (`sitsopt.graph.packed` has the layout): a line of 64 bytes holds the same few k's
of all 16, so that a lane is a row and nothing is added across lanes. Threads share out units as in `linear`.
"""

from __future__ import annotations

from ..kernel import Packed
from .linear import RUN_TEXT
from .packed_dot import DOT_TEXT, EXACT_TEXT, INTEGER_TEXT, PAIRS_TEXT
from .packed_unpack import UNPACK_TEXT

LINE_K = {"int8": 4, "int4": 8, "fp8": 4}
MOST_STEP = 64


def step_of(group: int) -> int:
    """k's that are added before scales come in: a whole group, or the largest even share of it up to 64."""
    if not group:
        return MOST_STEP
    return next(n for n in range(min(group, MOST_STEP) // 8 * 8, 0, -8) if group % n == 0)


def text(kernel: Packed) -> str:
    """The translation unit after vectors, elements and structs."""
    group = kernel.group or MOST_STEP
    head = {
        "SYMBOL": kernel.symbol,
        "GATED_SYMBOL": f"{kernel.symbol}_gated",
        "PROBE_SYMBOL": f"{kernel.symbol}_probe",
        "PART_SYMBOL": f"{kernel.symbol}_part",
        "ROOM_SYMBOL": f"{kernel.symbol}_room",
        "UNPACK_SYMBOL": f"{kernel.symbol}_unpack",
        "SHARE": 16384,
        kernel.scheme.upper(): 1,
        "GROUP": group,  # k's in a group
        "GROUPED": int(bool(kernel.group)),  # whether it has a scale of its own
        "LOW": int(kernel.low),
        "STEP": step_of(kernel.group),
        "LINE_K": LINE_K[kernel.scheme],
        "LIMBS": 1 if kernel.inputs else 2,
        "INTEGER_X": int(bool(kernel.inputs)),
    }
    lines = [f"#define {name} {value}" for name, value in head.items()]
    return "\n".join(
        [*lines, DOT_TEXT, EXACT_TEXT, INTEGER_TEXT, PAIRS_TEXT, _SUMS, RUN_TEXT, UNPACK_TEXT]
    )


_SUMS = r"""
// Words of activations a row, however they are kept; behind the last row, whether they are kept as f32.
static int64_t x_stride(int64_t k) {
#if defined(INTEGER)
    return integer_stride(k) > exact_stride(k) ? integer_stride(k) : exact_stride(k);
#else
    return exact_stride(k);
#endif
}

static bool prepare_row(const elem* from, int64_t k, float* block, int64_t row, int64_t rows, bool exact) {
    if (exact) return prepare_exact(from, k, block + row, rows), true;
#if defined(INTEGER)
    return prepare_integers(from, k, block, row, rows);
#elif defined(PAIRS)
    return prepare_pairs(from, k, block + 2 * row, rows), true;
#else
    return false;
#endif
}

static bool prepare_rows(const SitsLinear* a, float* x, bool exact) {
    int64_t size = block_of(a->m), stride = x_stride(a->k);
    for (int64_t m = 0; m < a->m; m++) {
        int64_t first = m / size * size, rows = a->m - first < size ? a->m - first : size;
        const elem* from = (const elem*)a->x + m * a->ldx;
        if (!prepare_row(from, a->k, x + first * stride, m - first, rows, exact)) return false;
    }
    return true;
}

// What is not finite cannot become an integer: such a call is computed in f32.
static void prepare(const SitsLinear* a, float* x) {
    bool exact = !prepare_rows(a, x, false);
    if (exact) prepare_rows(a, x, true);
    x[a->m * x_stride(a->k)] = exact;
}

template <int M> static void block_sums(const uint8_t* unit, const float* x, int64_t k, bool exact,
                                        float (*out)[UNIT]) {
#if defined(INTEGER)
    if (!exact) return integer_sums<M>(unit, x, k, out);
#elif defined(PAIRS)
    if (!exact) return pair_sums<M>(unit, x, k, out);
#endif
    exact_sums<M>(unit, x, k, out);
}

typedef void (*BlockFn)(const uint8_t*, const float*, int64_t, bool, float (*)[UNIT]);
static const BlockFn BLOCKS[BLOCK] = {
    block_sums<1>, block_sums<2>, block_sums<3>, block_sums<4>,
#if BLOCK == 8
    block_sums<5>, block_sums<6>, block_sums<7>, block_sums<8>,
#endif
};

static void unit_sums(const SitsLinear* a, const SitsWeight& weight, const float* x, int64_t from,
                      float (*out)[UNIT]) {
    const uint8_t* unit = (const uint8_t*)weight.w + from / UNIT * weight.ldw;
    int64_t stride = x_stride(a->k), size = block_of(a->m);
    bool exact = x[a->m * stride] != 0.0f;
    for (int64_t m = 0; m < a->m; m += size) {
        int64_t rows = a->m - m < size ? a->m - m : size;
        BLOCKS[rows - 1](unit, x + m * stride, a->k, exact, out + m);
    }
    finish(a, weight, unit, from, out);
}
"""
