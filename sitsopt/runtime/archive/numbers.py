"""From numbers and scales of any format to the form that is packed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...graph.packed import Rounded, power_of_two


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


def by_row(numbers: Tensor, scale: Tensor) -> Rounded:
    """numbers [N, K], one f32 scale [N] a row: exact."""
    return Rounded(numbers, None, None, scale.float())
