"""What the ops give back without computing: sizes, dtypes and strides, for fake and meta tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...graph import ops as _reference_ops  # noqa: F401  what no kernel takes is theirs


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    safe: bool = True,
) -> Tensor:
    """[B, Hq, T, Dv] laid out like q, as SDPA does on a CPU; contiguous when Dv is not D."""
    if v.shape[-1] == q.shape[-1]:
        return torch.empty_like(q)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """[*, N_i] a weight, contiguous."""
    return [x.new_empty((*x.shape[:-1], w.shape[0])) for w in weights]


def packed_linears(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    rows: list[int],
    scheme: str,
    group: int,
    low: bool,
    inputs: str,
) -> list[Tensor]:
    """[*, rows_i] a weight, contiguous."""
    return [x.new_empty((*x.shape[:-1], n)) for n in rows]


def gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    act: str,
) -> Tensor:
    """[*, N], contiguous."""
    return x.new_empty((*x.shape[:-1], gate.shape[0]))


def kv_attention_(q: Tensor, *more: Any, **named: Any) -> Tensor:
    """[B, Hq, T, D], contiguous."""
    return q.new_empty(q.shape)


def kv_attention(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, length: Tensor, *more: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and the new state and length."""
    return q.new_empty(q.shape), torch.empty_like(state), torch.empty_like(length)


def register() -> None:
    """Attaches them to the loaded ops."""
    for fn in (attention, kv_attention, kv_attention_, linears, packed_linears, gated):
        torch.library.register_fake(f"sits_cpp::{fn.__name__}", fn)
