"""Norms from tensors: the arguments and the grid of the rowwise kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sitsopt.emit.rowwise import Rowwise
from sitsopt.emit.triton import rowwise

from .runner import Runner

WIDE = 2**31 - 1  # elements up to which an offset fits 32 bits


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., H] as [rows, H] with neighbours in a row; copied only where no view is such."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def normalise(
    on: Runner,
    kernel: Rowwise,
    x: torch.Tensor,
    eps: float,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The normalised rows and, with a residual, its rounded sum with x; both dense and of x's shape."""
    kernel = replace(kernel, wide=x.numel() > WIDE) if isinstance(x.numel(), int) else kernel
    source = on.source(rowwise.source, kernel)
    flat = as_rows(x)
    out, total = flat.new_empty(flat.shape), None
    args: list[Any] = [flat]
    strides = [flat.stride(0)]
    if residual is not None:
        other, total = as_rows(residual), flat.new_empty(flat.shape)
        args += [other, total]
        strides.append(other.stride(0))
    args += [t.contiguous() for t in (weight, bias) if t is not None]
    args += [out, eps, flat.shape[0], *strides]
    on.run(source, rowwise.grid(source, flat.shape[0]), args)
    return out.reshape(x.shape), None if total is None else total.reshape(x.shape)
