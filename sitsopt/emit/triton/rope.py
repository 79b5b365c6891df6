"""Triton text of rotary embeddings: a program takes several (batch, head, token) rows of one tensor.

Both halves of a pair are in one thread, so x is read once and nothing is shuffled.
"""

from __future__ import annotations

from ..rope import Rope
from .source import HEADER, TL, Source, Writer, function, integers, next_power, pointer

STRIDES = ("x_b", "x_h", "x_t", "cos_b", "cos_t", "out_b", "out_h", "out_t")


def source(kernel: Rope) -> Source:
    """The kernel; x is [B, H, T, D] with any strides but the last, cos and sin are [B or 1, T, turned]."""
    write = Writer()
    write(HEADER)
    table = kernel.table or kernel.dtype
    params = (
        pointer("x_ptr", kernel.dtype), pointer("cos_ptr", table), pointer("sin_ptr", table),
        pointer("out_ptr", kernel.dtype), *integers("rows", "heads", "tokens", wide=kernel.wide),
        *integers(*STRIDES, wide=kernel.wide, aligned=kernel.head_dim % 16 == 0),
    )  # fmt: skip
    pair = next_power(kernel.turned // 2)
    constants = {"ROWS": max(1, 512 // pair), "PAIR": pair}
    doc = f"Rotary embedding, {kernel.style}, of heads of {kernel.head_dim} {kernel.dtype}."
    with function(write, kernel.name, params, constants, doc):
        program = "tl.program_id(0).to(tl.int64)" if kernel.wide else "tl.program_id(0)"
        write(f"row = {program} * ROWS + tl.arange(0, ROWS)[:, None]")
        write(_INDEX)
        write(f"keep = (row < rows) & (pair < {kernel.turned // 2})")
        if kernel.style == "half":
            write(f"first, second = pair, pair + {kernel.turned // 2}")
        else:
            write("first, second = 2 * pair, 2 * pair + 1")
        write(_TURN)
        for place, value in (("first", "low"), ("second", "high")):
            write(f"tl.store(out_ptr + to + {place}, {value}.to({TL[kernel.dtype]}), mask=keep)")
        if kernel.turned < kernel.head_dim:
            _copy_rest(write, kernel)
    return Source(
        kernel.name, "rope", write.text(), params, tuple(constants.items()),
        max(1, min(4, constants["ROWS"] * pair // 128)),
    )  # fmt: skip


_INDEX = """
batch = row // (heads * tokens)
head = row // tokens % heads
token = row % tokens
pair = tl.arange(0, PAIR)[None, :]
at = batch * x_b + head * x_h + token * x_t
turn = batch * cos_b + token * cos_t
to = batch * out_b + head * out_h + token * out_t
"""

_TURN = """
a = tl.load(x_ptr + at + first, mask=keep, other=0).to(tl.float32)
b = tl.load(x_ptr + at + second, mask=keep, other=0).to(tl.float32)
turn_a = tl.load(cos_ptr + turn + first, mask=keep, other=0).to(tl.float32)
turn_b = tl.load(cos_ptr + turn + second, mask=keep, other=0).to(tl.float32)
sin_a = tl.load(sin_ptr + turn + first, mask=keep, other=0).to(tl.float32)
sin_b = tl.load(sin_ptr + turn + second, mask=keep, other=0).to(tl.float32)
low = a * turn_a - b * sin_a
high = b * turn_b + a * sin_b
"""


def _copy_rest(write: Writer, kernel: Rope) -> None:
    rest = kernel.head_dim - kernel.turned
    write(f"other = tl.arange(0, {next_power(rest)})[None, :]")
    write(f"keep = (row < rows) & (other < {rest})")
    write(f"other += {kernel.turned}")
    write("tl.store(out_ptr + to + other, tl.load(x_ptr + at + other, mask=keep), mask=keep)")


def grid(source: Source, rows: int) -> tuple[int]:
    """How many programs `rows` (batch, head, token) rows take."""
    return (-(-rows // source.constant("ROWS")),)
