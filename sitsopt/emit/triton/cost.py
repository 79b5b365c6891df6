"""What a kernel moves and computes on its example problem: one decode step, or a prefill of 4,096 rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

from ..attention import FlashAttention, Merge
from ..cache import Append, Commit
from ..expr import Elementwise
from ..matmul import Matmul
from ..rope import Rope
from ..rowwise import Rowwise
from ..sample import Argmax, Draw
from .source import BYTES, Source

ROWS = 4096  # tokens of the prefill example
KEYS = 8192  # tokens of context of the decode example
KV_HEADS = 8
VOCABULARY = 128256
SPLITS = 32


@dataclass(frozen=True)
class Cost:
    """Bytes moved against the least possible, operations, and programs of the launch."""

    moved: float
    least: float
    flops: float
    programs: int
    problem: str
    unit: str = "f32"  # the operand type whose peak rate applies


def cost(kernel: object, source: Source) -> Cost:
    """The example of a kernel's family."""
    return _cost(kernel, source)


@singledispatch
def _cost(kernel: object, source: Source) -> Cost:
    raise TypeError(f"no example problem for {type(kernel).__name__}")


@_cost.register
def _(kernel: Elementwise, source: Source) -> Cost:
    cells, width = ROWS * 4096, 4096
    total = 0.0
    for operand in kernel.operands:
        count = width if operand.strides.startswith("0") else cells
        total += count * BYTES[operand.dtype]
    if kernel.dense:
        programs = -(-cells // source.constant("BLOCK"))
    else:
        programs = (ROWS // source.constant("ROWS")) * -(-width // source.constant("COLS"))
    return Cost(total, total, 10.0 * cells, programs, f"{ROWS} x {width}")


@_cost.register
def _(kernel: Rowwise, source: Source) -> Cost:
    cells = ROWS * kernel.size
    out = BYTES[kernel.quantize] if kernel.quantize else BYTES[kernel.dtype]
    least = cells * (BYTES[kernel.dtype] * (3 if kernel.residual else 1) + out)
    programs = -(-ROWS // source.constant("ROWS"))
    return Cost(least, least, 8.0 * cells, programs, f"{ROWS} rows")


@_cost.register
def _(kernel: Rope, source: Source) -> Cost:
    rows = ROWS * 32
    least = 2.0 * rows * kernel.head_dim * BYTES[kernel.dtype]
    programs = -(-rows // source.constant("ROWS"))
    return Cost(least, least, 6.0 * rows * kernel.head_dim, programs, f"{ROWS} tokens, 32 heads")


@_cost.register
def _(kernel: FlashAttention, source: Source) -> Cost:
    width = kernel.head_dim + kernel.value_dim
    per = BYTES[kernel.cache] if kernel.cache else BYTES[kernel.dtype]
    tokens, keys = (1, KEYS) if kernel.splits else (ROWS, ROWS)
    rows = tokens * kernel.group
    scales = keys * KV_HEADS * (4 if kernel.cache == "i4" else 2) * 2 if kernel.cache else 0
    cache = KV_HEADS * keys * width * per + scales
    queries = KV_HEADS * rows * width * BYTES[kernel.dtype]
    seen = 0.5 if kernel.causal and not kernel.splits else 1.0
    flops = 2.0 * KV_HEADS * rows * keys * width * seen
    blocks = -(-rows // source.constant("ROWS"))
    if kernel.splits:
        parts = KV_HEADS * SPLITS * rows * (kernel.value_dim + 2) * 4
        return Cost(
            cache + queries + parts, cache + queries, flops, KV_HEADS * SPLITS,
            f"1 token, {keys} keys, {KV_HEADS} kv heads", kernel.dtype,
        )  # fmt: skip
    reread = cache * blocks * seen
    return Cost(
        min(reread, cache * 4) + queries, cache + queries, flops, KV_HEADS * blocks,
        f"{tokens} tokens, {KV_HEADS} kv heads", kernel.dtype,
    )  # fmt: skip


@_cost.register
def _(kernel: Merge, source: Source) -> Cost:
    rows = KV_HEADS * kernel.group
    least = float(rows * (SPLITS * (kernel.value_dim + 2) * 4 + kernel.value_dim * 2))
    return Cost(least, least, 2.0 * rows * SPLITS * kernel.value_dim, rows, f"{SPLITS} parts")


@_cost.register
def _(kernel: Matmul, source: Source) -> Cost:
    rows = 1 if kernel.skinny else ROWS
    weights = kernel.rows * kernel.k * BYTES[kernel.weight or kernel.dtype]
    if kernel.weight == "i4":
        weights += kernel.rows * kernel.k / kernel.group * (4 if kernel.low else 2)
    ends = rows * (kernel.k + kernel.n * (2 if kernel.residual else 1)) * BYTES[kernel.dtype]
    flops = 2.0 * rows * kernel.rows * kernel.k
    strips = -(-kernel.n // source.constant("COLS"))
    unit = kernel.inputs or kernel.dtype
    if kernel.skinny:
        splits = source.constant("SPLITS")
        parts = 8.0 * splits * kernel.rows if splits > 1 else 0.0
        return Cost(weights + ends + parts, weights + ends, flops, strips * splits, "1 row", unit)
    tiles = strips * -(-rows // source.constant("ROWS"))
    return Cost(weights + ends, weights + ends, flops, tiles, f"{rows} rows", unit)


@_cost.register
def _(kernel: Append, source: Source) -> Cost:
    rows = 4 * KV_HEADS + KV_HEADS
    width = BYTES[kernel.dtype] * (rows * kernel.head_dim + KV_HEADS * kernel.value_dim) * 2
    programs = -(-rows // source.constant("ROWS"))
    return Cost(width, width, 6.0 * rows * kernel.head_dim, programs, "1 token")


@_cost.register
def _(kernel: Commit, source: Source) -> Cost:
    cells = KV_HEADS * KEYS * (kernel.head_dim + kernel.value_dim)
    least = cells * (BYTES[kernel.dtype] + BYTES[kernel.cache])
    return Cost(least, least, 8.0 * cells, KV_HEADS * KEYS // 64, f"{KEYS} keys")


@_cost.register
def _(kernel: Argmax, source: Source) -> Cost:
    least = float(VOCABULARY * BYTES[kernel.dtype])
    return Cost(least, least, float(VOCABULARY), source.constant("SPLITS"), f"{VOCABULARY} logits")


@_cost.register
def _(kernel: Draw, source: Source) -> Cost:
    least = float(VOCABULARY * BYTES[kernel.dtype])
    return Cost(20 * least, least, 300.0 * VOCABULARY, 1, f"{VOCABULARY} logits")
