"""From numbers and scales of any format to the form that is packed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...graph.archived import Archived
from ...graph.packed import Layout, Rounded, power_of_two

Rows = Callable[[int, int], Tensor]  # start, stop: the numbers of these rows, [stop - start, K]
MIDDLE = {"int4": 8, "int8": 0}  # the zero point that needs no lowest value


def grouped(numbers: Tensor, scale: Tensor, low: Tensor | None = None) -> Rounded:
    """numbers [N, K] (int8, or fp8 as bytes), each q for q * scale + low of its group [N, groups].

    f16 stays as it is. Wider scales are rounded to f16, of a power of two a row: 2^-11 of a scale at most.
    """
    n = numbers.shape[0]
    if scale.dtype == torch.float16 and (low is None or low.dtype == torch.float16):
        return Rounded(numbers, scale, low, torch.ones(n))
    scale = scale.float()
    low = None if low is None else low.float()
    most = scale.abs() if low is None else torch.maximum(scale.abs(), low.abs())
    factor = power_of_two(most.amax(1))
    by = factor[:, None]
    return Rounded(numbers, (scale / by).half(), None if low is None else (low / by).half(), factor)


def integers(
    scheme: str, shape: tuple[int, int], rows: Rows, scale: Tensor, zero: Tensor | None, source: str
) -> Archived | str:
    """A weight [N, K] of numbers q (int4: 0..15, int8: -128..127), each for (q - zero) * scale; both [N, groups], of
    groups of equal size. A text says why it cannot be packed."""
    _, k = shape
    groups = scale.shape[1]
    size = -(-k // groups)
    if zero is not None and bool((zero == MIDDLE[scheme]).all()):
        zero = None
    if groups == 1:
        return _by_row(Layout(scheme, 0, zero is not None), shape, rows, scale[:, 0], zero, source)
    if size % 8 or size * groups < k or size * (groups - 1) >= k:
        return f"{source} has groups of {size}: not a multiple of 8"
    low = None if zero is None else -zero.float() * scale.float()
    layout = Layout(scheme, size, low is not None)

    def read(start: int, stop: int) -> Rounded:
        numbers = _padded(rows(start, stop), layout)
        return grouped(numbers, scale[start:stop], None if low is None else low[start:stop])

    return Archived(layout, shape, read, source, scale.dtype == torch.float16 and low is None)


def _by_row(
    layout: Layout,
    shape: tuple[int, int],
    rows: Rows,
    scale: Tensor,
    zero: Tensor | None,
    source: str,
) -> Archived:
    """One f32 scale a row, and where there is one a zero point: exact."""

    def read(start: int, stop: int) -> Rounded:
        low = None if zero is None else -zero[start:stop, 0].float()
        return Rounded(_padded(rows(start, stop), layout), None, low, scale[start:stop].float())

    return Archived(layout, shape, read, source)


def floats(shape: tuple[int, int], rows: Rows, scale: Tensor, source: str) -> Archived | str:
    """A weight [N, K] of e4m3 floats times one scale, one a row [N, 1], or one a block of 128 x 128."""
    n, k = shape
    if scale.numel() == 1 or scale.numel() == n:
        per_row = scale.reshape(-1).float().expand(n)
        return _by_row(Layout("fp8"), shape, _bytes(rows), per_row, None, source)
    if tuple(scale.shape) != (-(-n // 128), -(-k // 128)):
        return f"{source} has scales of {list(scale.shape)}: not one a row or a block of 128 x 128"
    layout = Layout("fp8", 128)
    by_row = scale.float().repeat_interleave(128, 0)[:n]
    as_bytes = _bytes(rows)

    def read(start: int, stop: int) -> Rounded:
        return grouped(_padded(as_bytes(start, stop), layout), by_row[start:stop])

    return Archived(layout, shape, read, source, exact=False)


def _bytes(rows: Rows) -> Rows:
    return lambda start, stop: rows(start, stop).view(torch.uint8)


def _padded(numbers: Tensor, layout: Layout) -> Tensor:
    return F.pad(numbers, (0, -numbers.shape[1] % layout.width))
