"""Rotary embedding from tensors: whatever the order of heads and tokens, by strides."""

from __future__ import annotations

from dataclasses import replace

import torch

from sitsopt.emit.rope import Rope
from sitsopt.emit.triton import rope

from .rows import WIDE
from .runner import NoText, Runner


def rotate(
    on: Runner, kernel: Rope, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """x [..., D] turned by tables that broadcast against x; one of x's two middle dims has one table for all."""
    if x.dim() > 4:
        raise NoText("more than four dims")
    full = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
    full = full if full.stride(3) == 1 else full.contiguous()
    out = full.new_empty(full.shape)
    shape = (*full.shape[:3], kernel.turned)
    turns = [t.expand(shape) for t in (cos, sin)]
    turns = [t if t.stride(3) == 1 else t.contiguous() for t in turns]
    if turns[0].stride() != turns[1].stride():
        turns = [t.contiguous() for t in turns]
    free = next((d for d in (1, 2) if _same(turns[0], d)), None)
    if free is None:
        raise NoText("a table of its own for every head")
    head, token = free, 3 - free
    heads, tokens = full.shape[head], full.shape[token]
    rows = full.shape[0] * heads * tokens
    reach = max(full.numel(), turns[0].numel()) if isinstance(full.numel(), int) else 0
    source = on.source(rope.source, replace(kernel, wide=reach > WIDE))
    table = [0 if _same(turns[0], d) else turns[0].stride(d) for d in (0, token)]
    strides = [
        *(full.stride(d) for d in (0, head, token)), *table, *(out.stride(d) for d in (0, head, token)),
    ]  # fmt: skip
    on.run(
        source, rope.grid(source, rows), [full, *turns, out, rows, heads, tokens, *strides],
    )  # fmt: skip
    return out.reshape(x.shape)


def _same(table: torch.Tensor, dim: int) -> bool:
    """Whether a table is one for all of a dim: spread over it, or nothing to spread."""
    return bool(table.stride(dim) == 0 or table.shape[dim] == 1)
