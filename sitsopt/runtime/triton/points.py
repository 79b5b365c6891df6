"""Pointwise kernels from tensors: dense where all lie alike, else a tile of rows and columns."""

from __future__ import annotations

from typing import Any

import torch

from sitsopt.emit.expr import Elementwise, Expr, Operand
from sitsopt.emit.triton import elementwise

from .rows import WIDE
from .runner import Runner


def compute(
    on: Runner, name: str, expr: Expr, inputs: dict[str, torch.Tensor], **scalars: float
) -> torch.Tensor:
    """The value of `expr` for every element; the inputs have one shape and dtype, the result is dense."""
    first = next(iter(inputs.values()))
    out = first.new_empty(first.shape)
    dtype = DTYPES[first.dtype]
    dense = first.dim() == 0 or all(t.is_contiguous() for t in inputs.values())
    rank = max(first.dim(), 1)
    wide = isinstance(first.numel(), int) and any(map(_far, inputs.values()))
    operands = [
        Operand(n, dtype, "" if dense else "?" * (rank - 1) + ("1" if t.stride(-1) == 1 else "?"))
        for n, t in inputs.items()
    ]
    tail = f"{name}_{dtype}" + "_strided" * (not dense) + "_wide" * wide
    kernel = Elementwise(
        tail, rank, tuple(operands), ((Operand("y", dtype), expr),), tuple(scalars), wide
    )
    source = on.source(elementwise.source, kernel)
    args: list[Any] = [*inputs.values(), out, *scalars.values()]
    if dense:
        args.append(first.numel())
    else:
        args += first.shape
        for operand, t in zip(operands, inputs.values(), strict=True):
            args += [t.stride(i) for i, kind in enumerate(operand.strides) if kind == "?"]
    on.run(source, elementwise.grid(kernel, source, first.shape), args)
    return out


def _far(t: torch.Tensor) -> bool:
    reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return bool(reach > WIDE)


DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
