"""Triton text of one step of a matrix product: a block of k is read, expanded where quantized, multiplied.

Scales stay out of the product where they can: one a row waits for the end, one a group or block multiplies the
step's result, which is [rows, cols] and not [cols, k].
"""

from __future__ import annotations

from ..matmul import Matmul
from .quantize import read_fp8
from .source import TL, Writer


def accumulators(kernel: Matmul) -> list[str]:
    """What the sums are called: one of y, or one of each half when gated."""
    return ["gate", "up"] if kernel.gated else ["acc"]


def write_step(write: Writer, kernel: Matmul) -> None:
    """One turn of the loop; `step` counts blocks of k."""
    if kernel.weight == "i4":
        _int4_step(write, kernel)
        return
    write("k = step * STEP + tl.arange(0, STEP)")
    _load_x(write, kernel, "x", "k")
    for i, name in enumerate(accumulators(kernel)):
        _load_w(write, kernel, i * kernel.n)
        _multiply(write, kernel, name, i)


def _load_x(write: Writer, kernel: Matmul, name: str, k: str) -> None:
    wide = "" if kernel.skinny else ".to(tl.int64)"
    keep = "(m < rows)[:, None]" + _k_keep(kernel, f"{k}[None, :]")
    at = f"x_ptr + (m{wide} * x_stride)[:, None] + {k}[None, :]"
    zero = "0.0" if kernel.inputs == "f8e4m3" else "0"
    write(f"{name} = tl.load({at}, mask={keep}, other={zero})")
    if not kernel.norm:
        return
    write(f"{name} = {name}.to(tl.float32) * rstd[:, None]")
    if kernel.round_first and kernel.dtype != "f32":
        write(f"{name} = {name}.to({TL[kernel.dtype]}).to(tl.float32)")
    inside = f", mask={k} < {kernel.k}, other=0" if _k_keep(kernel, k) else ""
    write(f"gain = tl.load(gain_ptr + {k}{inside}).to(tl.float32)")
    if kernel.offset:
        write(f"gain += {kernel.offset}")
    write(f"{name} = ({name} * gain[None, :]).to({TL[kernel.dtype]})")


def _k_keep(kernel: Matmul, k: str) -> str:
    """The mask against the end of k; none is needed when every block size divides it."""
    return "" if kernel.k % 128 == 0 else f" & ({k} < {kernel.k})"


def _n_keep(kernel: Matmul) -> str:
    return "" if kernel.n % 128 == 0 else f"(n < {kernel.n})[None, :]"


def _load_w(write: Writer, kernel: Matmul, shift: int) -> None:
    """w [k, cols], in a dtype that the product takes."""
    keep = " & ".join(part for part in (_n_keep(kernel), _k_keep(kernel, "k[:, None]")[3:]) if part)
    zero = "0.0" if kernel.weight == "f8e4m3" and kernel.native_fp8 else "0"
    guard = f", mask={keep}, other={zero}" if keep else ""
    once = ', eviction_policy="evict_first"' if kernel.skinny else ""
    row = f"(n + {shift})" if shift else "n"
    write(f"w = tl.load(w_ptr + ({row} * {kernel.k})[None, :] + k[:, None]{guard}{once})")
    if kernel.inputs:
        return
    if kernel.weight == "i8":
        write(f"w = w.to({TL[kernel.dtype]})")
    elif kernel.weight == "f8e4m3":
        write(f"w = {read_fp8('w', TL[kernel.dtype], kernel.native_fp8)}")


def _multiply(write: Writer, kernel: Matmul, name: str, half: int) -> None:
    exact = ', input_precision="ieee"' if kernel.dtype == "f32" else ""
    if kernel.weight == "f8e4m3" and kernel.group:
        blocks = -(-kernel.k // kernel.group)
        at = f"(n + {half * kernel.n}) // {kernel.group} * {blocks} + step * STEP // {kernel.group}"
        guard = "" if kernel.n % 128 == 0 else f", mask=n < {kernel.n}, other=0"
        write(f"scale = tl.load(scale_ptr + {at}{guard})")
        write(f"{name} += tl.dot(x, w{exact}) * scale[None, :]")
        return
    kind = ", out_dtype=tl.int32" if kernel.inputs == "i8" else exact
    write(f"{name} = tl.dot(x, w, {name}{kind})")


def _int4_step(write: Writer, kernel: Matmul) -> None:
    """A step is a group: byte j of it holds k = j in its low four bits and j + group/2 above."""
    half = kernel.group // 2
    write(f"byte = tl.arange(0, {half})")
    write("k = step * STEP + byte")
    write(f"k_high = k + {half}")
    _load_x(write, kernel, "x_low", "k")
    _load_x(write, kernel, "x_high", "k_high")
    write("x_sum = tl.sum(x_low.to(tl.float32), 1) + tl.sum(x_high.to(tl.float32), 1)")
    guard = "" if kernel.n % 128 == 0 else f", mask=n < {kernel.n}, other=0"
    for i, name in enumerate(accumulators(kernel)):
        row = f"(n + {i * kernel.n})" if i else "n"
        keep = f", mask={_n_keep(kernel)}, other=0" if _n_keep(kernel) else ""
        once = ', eviction_policy="evict_first"' if kernel.skinny else ""
        at = f"({row} * {kernel.k // 2})[None, :] + (step * {half} + byte)[:, None]"
        write(f"w = tl.load(w_ptr + {at}{keep}{once})")
        kind = TL[kernel.dtype]
        exact = ', input_precision="ieee"' if kernel.dtype == "f32" else ""
        write(f"product = tl.dot(x_low, (w & 15).to({kind}){exact})")
        write(f"product = tl.dot(x_high, (w >> 4).to({kind}), product{exact})")
        write(f"scale = tl.load(scale_ptr + step * {kernel.rows} + {row}{guard}).to(tl.float32)")
        if kernel.low:
            write(f"low = tl.load(low_ptr + step * {kernel.rows} + {row}{guard}).to(tl.float32)")
            write(f"{name} += product * scale[None, :] + x_sum[:, None] * low[None, :]")
        else:
            write(f"{name} += (product - 8.0 * x_sum[:, None]) * scale[None, :]")
