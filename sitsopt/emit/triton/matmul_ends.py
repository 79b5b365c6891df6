"""Triton text of what stands around a matrix product: the norm before it, scale, bias, activation after it."""

from __future__ import annotations

from ..matmul import Matmul
from .matmul_tile import accumulators
from .pointwise import activation
from .source import TL, Writer


def write_prologue(write: Writer, kernel: Matmul) -> None:
    """rstd: of every row of x, which is small and comes from the L2 cache a second time."""
    if not kernel.norm:
        return
    write("square = tl.zeros([ROWS], tl.float32)")
    with write.block(f"for start in range(0, {kernel.k}, 256):"):
        write(f"""
            across_k = start + tl.arange(0, 256)
            inside_x = (m < rows)[:, None] & (across_k < {kernel.k})[None, :]
            x_all = tl.load(x_ptr + (m * x_stride)[:, None] + across_k[None, :], mask=inside_x, other=0)
            x_all = x_all.to(tl.float32)
            square += tl.sum(x_all * x_all, 1)
        """)
    write(f"rstd = tl.rsqrt(square / {kernel.k} + eps)")


def write_result(write: Writer, kernel: Matmul) -> None:
    """From the sums to y."""
    write(f"inside = (m < rows)[:, None] & (n < {kernel.n})[None, :]")
    names = accumulators(kernel)
    for i, name in enumerate(names):
        _rescale(write, kernel, name, i * kernel.n)
        if kernel.bias:
            bias = f"tl.load(bias_ptr + n + {i * kernel.n}, mask=n < {kernel.n}, other=0)"
            write(f"{name} += {bias}.to(tl.float32)[None, :]")
    first = names[0]
    write(f"y = {activation(kernel.act, first)}" if kernel.act else f"y = {first}")
    if kernel.gated:
        write("y = y * up")
    place = "(m.to(tl.int64) * y_stride)[:, None] + n[None, :]"
    if kernel.residual:
        write(f"y += tl.load(residual_ptr + {place}, mask=inside, other=0).to(tl.float32)")
    write(f"tl.store(y_ptr + {place}, y.to({TL[kernel.dtype]}), mask=inside)")


def _rescale(write: Writer, kernel: Matmul, name: str, shift: int) -> None:
    if kernel.inputs:
        write("x_scale = tl.load(x_scale_ptr + m, mask=m < rows, other=0)")
        write(f"{name} = {name}.to(tl.float32) * x_scale[:, None]")
    if kernel.weight in ("i8", "f8e4m3") and not kernel.group:
        scale = f"tl.load(scale_ptr + n + {shift}, mask=n < {kernel.n}, other=0)"
        write(f"{name} = {name} * {scale}[None, :]")
