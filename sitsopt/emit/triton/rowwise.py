"""Triton text of norms and softmax over rows.

A row that fits a block stays in registers, read once and written once; short rows share a program. A longer row
is walked: once for each statistic, once for the result; all but the first walk find it in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..rowwise import Rowwise
from .quantize import write_fp8, write_int8, write_row_scale
from .source import (
    HEADER,
    LIMITS,
    TL,
    Param,
    Source,
    Writer,
    floats,
    function,
    integers,
    next_power,
    pointer,
)

LONGEST_BLOCK = 16384  # elements of one row that a program holds in registers


def source(kernel: Rowwise) -> Source:
    """The kernel; its grid is (blocks of rows,)."""
    write = Writer()
    write(HEADER)
    block = min(next_power(kernel.size, 16), LONGEST_BLOCK if not walks(kernel) else 4096)
    per_program = max(1, min(16, 1024 // block))
    constants = {"ROWS": per_program, "BLOCK": block}
    with function(write, kernel.name, _params(kernel), constants, _doc(kernel)):
        _index(write, kernel)
        if walks(kernel):
            _walk(write, kernel)
        else:
            _hold(write, kernel)
    warps = max(1, min(16, block * per_program // 512))
    return Source(
        kernel.name, "rowwise", write.text(), _params(kernel), tuple(constants.items()), warps
    )


def walks(kernel: Rowwise) -> bool:
    """Whether a row is too long for one block."""
    return kernel.size > LONGEST_BLOCK


def grid(source: Source, rows: int) -> tuple[int]:
    """How many programs `rows` rows take."""
    return (-(-rows // source.constant("ROWS")),)


def _params(kernel: Rowwise) -> tuple[Param, ...]:
    params = [pointer("x_ptr", kernel.dtype)]
    if kernel.residual:
        params += [pointer("residual_ptr", kernel.dtype), pointer("sum_ptr", kernel.dtype)]
    params += [pointer("weight_ptr", kernel.weight)] if kernel.weight else []
    params += [pointer("bias_ptr", kernel.bias)] if kernel.bias else []
    stored = kernel.quantize or kernel.dtype
    if stored == "f8e4m3" and not kernel.native_fp8:
        stored = "u8"
    params += [pointer("out_ptr", stored)]
    params += [pointer("scale_ptr", "f32")] if kernel.quantize else []
    params += floats("factor") if kernel.op == "softmax" else floats("eps")
    params += integers("rows", wide=kernel.wide)
    params += integers("x_stride", wide=kernel.wide, aligned=kernel.size % 16 == 0)
    if kernel.residual:
        params += integers("residual_stride", wide=kernel.wide, aligned=kernel.size % 16 == 0)
    return tuple(params)


def _doc(kernel: Rowwise) -> str:
    what = f"{'add, ' * kernel.residual}{kernel.op}{', quantize' * bool(kernel.quantize)}"
    return f"{what} over rows of {kernel.size} {kernel.dtype}, in f32."


def _index(write: Writer, kernel: Rowwise) -> None:
    program = "tl.program_id(0).to(tl.int64)" if kernel.wide else "tl.program_id(0)"
    write(f"row = {program} * ROWS + tl.arange(0, ROWS)[:, None]")
    write("live = row < rows")


def _columns(write: Writer, kernel: Rowwise, start: str = "") -> None:
    write(f"col = {start}tl.arange(0, BLOCK)[None, :]")
    write(f"keep = live & (col < {kernel.size})")


def _load(write: Writer, kernel: Rowwise, other: str = "0") -> None:
    """x: the row's values in f32, as the statistics see them."""
    write(f"x = tl.load(x_ptr + row * x_stride + col, mask=keep, other={other}).to(tl.float32)")
    if kernel.residual:
        write(
            "x += tl.load(residual_ptr + row * residual_stride + col, mask=keep, other=0).to(tl.float32)"
        )
        write(f"x = x.to({TL[kernel.dtype]}).to(tl.float32)")


def _hold(write: Writer, kernel: Rowwise) -> None:
    _columns(write, kernel)
    softmax = kernel.op == "softmax"
    _load(write, kernel, 'float("-inf")' if softmax else "0")
    _store_sum(write, kernel)
    if softmax:
        write("x = tl.where(keep, x * factor, float('-inf'))")
        write("top = tl.max(x, 1)[:, None]")
        write("x = tl.exp(x - top)")
        write("total = tl.sum(x, 1)[:, None]")
    elif kernel.op == "layer_norm":
        write(f"mean = tl.sum(x, 1)[:, None] / {kernel.size}")
        write("gap = tl.where(keep, x - mean, 0.0)")
        write(f"rstd = tl.rsqrt(tl.sum(gap * gap, 1)[:, None] / {kernel.size} + eps)")
    else:
        write(f"rstd = tl.rsqrt(tl.sum(x * x, 1)[:, None] / {kernel.size} + eps)")
    _result(write, kernel)
    if kernel.quantize:
        write("largest = tl.max(tl.where(keep, tl.abs(y), 0.0), 1)[:, None]")
        write_row_scale(write, "scale", "largest", LIMITS[kernel.quantize])
        write("tl.store(scale_ptr + row, scale, mask=live)")
    _store(write, kernel)


def _walk(write: Writer, kernel: Rowwise) -> None:
    {"softmax": _walk_softmax, "layer_norm": _walk_layer, "rms_norm": _walk_rms}[kernel.op](
        write, kernel
    )
    if kernel.quantize:
        write("largest = tl.zeros([ROWS, 1], tl.float32)")
        with _each_block(write, kernel):
            _load(write, kernel)
            _result(write, kernel)
            write("now = tl.max(tl.where(keep, tl.abs(y), 0.0), 1)[:, None]")
            write("largest = tl.maximum(largest, now)")
        write_row_scale(write, "scale", "largest", LIMITS[kernel.quantize])
        write("tl.store(scale_ptr + row, scale, mask=live)")
    with _each_block(write, kernel):
        _load(write, kernel)
        _store_sum(write, kernel)
        if kernel.op == "softmax":
            write("x = tl.exp(x * factor - top)")
        _result(write, kernel)
        _store(write, kernel)


@contextmanager
def _each_block(write: Writer, kernel: Rowwise) -> Iterator[None]:
    with write.block(f"for start in range(0, {kernel.size}, BLOCK):"):
        _columns(write, kernel, "start + ")
        yield


def _walk_softmax(write: Writer, kernel: Rowwise) -> None:
    write('top = tl.full([ROWS, 1], float("-inf"), tl.float32)')
    write("total = tl.zeros([ROWS, 1], tl.float32)")
    with _each_block(write, kernel):
        _load(write, kernel)
        write("""
            x = tl.where(keep, x * factor, float("-inf"))
            higher = tl.maximum(top, tl.max(x, 1)[:, None])
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 1)[:, None]
            top = higher
        """)


def _walk_layer(write: Writer, kernel: Rowwise) -> None:
    write("total = tl.zeros([ROWS, BLOCK], tl.float32)")
    with _each_block(write, kernel):
        _load(write, kernel)
        write("total += x")
    write(f"mean = tl.sum(total, 1)[:, None] / {kernel.size}")
    write("total = tl.zeros([ROWS, BLOCK], tl.float32)")
    with _each_block(write, kernel):
        _load(write, kernel)
        write("gap = tl.where(keep, x - mean, 0.0)")
        write("total += gap * gap")
    write(f"rstd = tl.rsqrt(tl.sum(total, 1)[:, None] / {kernel.size} + eps)")


def _walk_rms(write: Writer, kernel: Rowwise) -> None:
    write("total = tl.zeros([ROWS, BLOCK], tl.float32)")
    with _each_block(write, kernel):
        _load(write, kernel)
        write("total += x * x")
    write(f"rstd = tl.rsqrt(tl.sum(total, 1)[:, None] / {kernel.size} + eps)")


def _result(write: Writer, kernel: Rowwise) -> None:
    """y: the output in f32 with the roundings that eager code makes."""
    narrow = f".to({TL[kernel.dtype]}).to(tl.float32)"
    if kernel.op == "softmax":
        write("y = x / total")
    elif kernel.op == "layer_norm":
        write("y = (x - mean) * rstd")
    else:
        write("y = x * rstd")
    if kernel.op == "rms_norm" and kernel.round_first and kernel.dtype != "f32":
        write(f"y = y{narrow}")
    if kernel.weight:
        write("gain = tl.load(weight_ptr + col, mask=keep, other=0).to(tl.float32)")
        if kernel.offset:
            write(f"gain += {kernel.offset}")
            if kernel.round_first and kernel.weight != "f32":
                write(f"gain = gain.to({TL[kernel.weight]}).to(tl.float32)")
        write("y = y * gain")
    if kernel.bias:
        write("y += tl.load(bias_ptr + col, mask=keep, other=0).to(tl.float32)")
    if kernel.quantize and kernel.dtype != "f32":
        write(f"y = y{narrow}")


def _store_sum(write: Writer, kernel: Rowwise) -> None:
    if kernel.residual:
        write(f"tl.store(sum_ptr + row * {kernel.size} + col, x.to({TL[kernel.dtype]}), mask=keep)")


def _store(write: Writer, kernel: Rowwise) -> None:
    if kernel.quantize == "i8":
        write_int8(write, "q", "(y / scale)")
    elif kernel.quantize:
        write("y = y / scale")
        write_fp8(write, "q", "y", kernel.native_fp8)
    else:
        write(f"q = y.to({TL[kernel.dtype]})")
    write(f"tl.store(out_ptr + row * {kernel.size} + col, q, mask=keep)")
