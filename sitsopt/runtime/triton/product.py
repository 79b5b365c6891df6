"""Matrix products from tensors: packed weights, the arguments and the grid of the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sitsopt.emit.matmul import Matmul
from sitsopt.emit.triton import matmul
from sitsopt.emit.triton.source import Source

from .runner import Run


@dataclass
class Weight:
    """A weight as the kernel reads it.

    int8: a scale a row [n]. int4: two k's a byte inside each group (j and j + group/2), scale and low
    [k / group, n] in f16: value = scale * nibble + low, or scale * (nibble - 8). fp8: bytes of e4m3, a scale
    a row [n], or a block of 128 x 128 [n / 128, k / 128].
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    low: torch.Tensor | None = None


@dataclass
class Around:
    """What stands before and after the product, as the kernel description says it is there."""

    gain: torch.Tensor | None = None
    eps: float = 0.0
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None


def multiply(
    run: Run,
    kernel: Matmul,
    x: torch.Tensor,
    weight: Weight,
    around: Around,
    y: torch.Tensor,
    *,
    units: int = 1,
    source: Source | None = None,
    place: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes y [M, n]. units: processors of the device, for the wide kernel's programs. place: room for split
    sums and counters at zero; without it the device's own, which launches on one stream share."""
    source = source or matmul.source(kernel)
    rows = x.shape[0]
    data = weight.data
    if kernel.weight == "f8e4m3" and kernel.native_fp8 and data.dtype == torch.uint8:
        data = data.view(torch.float8_e4m3fn)
    args: list[Any] = [x, data] + [around.x_scale] * bool(kernel.inputs)
    args += [weight.scale] * bool(kernel.weight) + [weight.low] * kernel.low
    args += [around.gain] * kernel.norm + [around.bias] * kernel.bias
    args += [around.residual] * kernel.residual + [y]
    strips = -(-kernel.n // source.constant("COLS"))
    grid: tuple[int, ...]
    if kernel.skinny:
        splits = source.constant("SPLITS")
        args += [*(place or _meeting_place(x.device, splits * rows * kernel.rows, strips))]
        grid = (strips, splits)
    else:
        tiles = strips * -(-rows // source.constant("ROWS"))
        grid = (min(tiles, units),)
    args += [around.eps] * kernel.norm + [rows, x.stride(0), y.stride(0)]
    if rows and kernel.n:
        run(source, grid, args)


_places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def _meeting_place(
    device: torch.device, floats: int, strips: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for split sums and the counters of the strips, which every kernel leaves at zero."""
    part, lock = _places.get(device, (torch.empty(0), torch.empty(0)))
    if part.numel() < floats:
        part = torch.empty(floats, dtype=torch.float32, device=device)
    if lock.numel() < strips:
        lock = torch.zeros(strips, dtype=torch.int32, device=device)
    _places[device] = (part, lock)
    return part, lock


def pick_splits(kernel: Matmul, cols: int, units: int) -> int:
    """A power of two that gives every unit at least two programs, each with four steps or more."""
    strips = -(-kernel.n // cols)
    splits = 1
    while splits < 32 and strips * splits < 2 * units and kernel.k // (splits * 2) >= 512:
        splits *= 2
    return splits


def pack_int8(weight: torch.Tensor) -> Weight:
    """Symmetric, a scale a row."""
    scale = (weight.float().abs().amax(1) / 127).clamp(min=1e-30)
    return Weight(torch.round(weight.float() / scale[:, None]).to(torch.int8), scale)


def pack_int4(weight: torch.Tensor, group: int, low: bool) -> Weight:
    """Groups along k, with or without a zero point."""
    tiles = weight.float().unflatten(1, (-1, group))
    if low:
        base = tiles.amin(2).half()
        scale = ((tiles.amax(2) - base.float()) / 15).clamp(min=6e-8).half()
        nibbles = torch.round((tiles - base.float()[..., None]) / scale.float()[..., None])
    else:
        base = None
        scale = (tiles.abs().amax(2) / 7).clamp(min=6e-8).half()
        nibbles = torch.round(tiles / scale.float()[..., None]) + 8
    first, second = nibbles.clamp(0, 15).to(torch.uint8).chunk(2, 2)
    data = (first | (second << 4)).flatten(1)
    return Weight(data, scale.t().contiguous(), None if base is None else base.t().contiguous())


def pack_fp8(weight: torch.Tensor, block: int = 0) -> Weight:
    """e4m3, a scale a row or a block; the bytes are uint8."""
    wide = weight.float()
    n, k = weight.shape
    if block:
        padded = torch.nn.functional.pad(wide, (0, -k % block, 0, -n % block))
        tiles = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
        scale = (tiles.abs().amax((1, 3)) / 448).clamp(min=1e-30)
        spread = scale.repeat_interleave(block, 0)[:n].repeat_interleave(block, 1)[:, :k]
    else:
        scale = (wide.abs().amax(1) / 448).clamp(min=1e-30)
        spread = scale[:, None]
    return Weight((wide / spread).to(torch.float8_e4m3fn).view(torch.uint8), scale)


def unpack(weight: Weight, kernel: Matmul) -> torch.Tensor:
    """The f64 matrix that a packed weight stands for."""
    if not kernel.weight:
        return weight.data.double()
    assert weight.scale is not None
    scale = weight.scale.double()
    if kernel.weight == "i4":
        tiles = weight.data.unflatten(1, (-1, kernel.group // 2))
        nibbles = torch.cat([tiles & 15, tiles >> 4], 2).double()
        scale = scale.t()[..., None]
        if weight.low is not None:
            return (nibbles * scale + weight.low.double().t()[..., None]).flatten(1)
        return ((nibbles - 8) * scale).flatten(1)
    data = weight.data
    if kernel.weight == "f8e4m3":
        data = data.view(torch.float8_e4m3fn)
    if kernel.group:
        n, k = data.shape
        spread = scale.repeat_interleave(kernel.group, 0)[:n]
        return data.double() * spread.repeat_interleave(kernel.group, 1)[:, :k]
    return data.double() * scale[:, None]
