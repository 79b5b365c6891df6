"""Which kernel a `sits::` node gets: its facts read from the graph, the kernels asked, the reason kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import tensor
from . import kernels

Found = tuple[Any, str]


def kernel_for(node: Node) -> Found:
    """The op overload to call instead of a `sits::` op, with a note; (None, why) where there is none."""
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    ask = _ASK.get(name)
    if ask is None:
        return None, "Inductor fuses it with its neighbours"
    return ask(node)


def _attention(node: Node) -> Found:
    q, v = tensor(node.args[0]), tensor(node.args[2])
    if q is None or v is None:
        return None, "its inputs are no tensors"
    if not isinstance(q.shape[-1], int) or not isinstance(v.shape[-1], int):
        return None, "the head size is symbolic"
    facts = {"head_dim": q.shape[-1], "value_dim": v.shape[-1]}
    return _ask("attention", q, facts, "keys and values are read once per group of query heads")


def _linears(node: Node) -> Found:
    x = tensor(node.args[0])
    weights: Any = node.args[1]
    first = tensor(weights[0])
    if x is None or first is None:
        return None, "its inputs are no tensors"
    if any(w.dtype != x.dtype for w in map(tensor, weights) if w is not None):
        return None, "weights and input differ in dtype"
    rows = x.numel() // x.shape[-1] if isinstance(x.numel(), int) and x.shape[-1] else None
    return _ask("linears", x, {"rows": rows}, "weights are read where they lie, all in one parallel region")


def _ask(name: str, x: torch.Tensor, facts: dict[str, Any], note: str) -> Found:
    found = kernels.lookup(name, dtype=x.dtype, device=x.device, **facts)
    if found is not None:
        return found, note
    return None, kernels.why_not(name, dtype=x.dtype, device=x.device, **facts)


_ASK: dict[str, Callable[[Node], Found]] = {"attention": _attention, "linears": _linears}
