"""Which kernel a `sits::` node gets: its facts read from the graph, the kernels asked, the reason kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import tensor
from . import kernels

Found = tuple[Any, str]
Ask = Callable[[str, torch.Tensor, dict[str, Any], str], Found]


def kernel_for(node: Node) -> Found:
    """The op overload to call instead of a `sits::` op, with a note; (None, why) where there is none."""
    return _found(node, _ask)


def foreseen(node: Node) -> tuple[bool, str]:
    """Whether a CPU has a kernel for a `sits::` op, by its facts alone, and a note or why not. Builds nothing, and
    takes a tensor of the meta device for one of the CPU."""

    def ask(name: str, x: torch.Tensor, facts: dict[str, Any], note: str) -> Found:
        why = kernels.refusal(name, x.dtype, "cpu", facts)
        return (None, why) if why else (name, note)

    found, why = _found(node, ask)
    return found is not None, why


def _found(node: Node, ask: Ask) -> Found:
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    facts = _FACTS.get(name)
    if facts is None:
        return None, "Inductor fuses it with its neighbours"
    return facts(node, ask)


def _attention(node: Node, ask: Ask) -> Found:
    q, k, v = (tensor(arg) for arg in node.args[:3])
    if q is None or k is None or v is None:
        return None, "its inputs are no tensors"
    if not q.dtype == k.dtype == v.dtype:
        return None, "queries, keys and values differ in dtype"
    if not isinstance(q.shape[-1], int) or not isinstance(v.shape[-1], int):
        return None, "the head size is symbolic"
    facts = {"head_dim": q.shape[-1], "value_dim": v.shape[-1]}
    if node.kwargs.get("safe", node.args[8] if len(node.args) > 8 else True) is False:
        # With more rows than the kernel takes the op is put together from ATen's; so is Inductor's, and fused.
        if not isinstance(q.shape[2], int) and kernels.limited(q.dtype):
            return None, "written-out attention, and the number of query rows varies"
        facts["q_rows"] = q.shape[2] if isinstance(q.shape[2], int) else None
    return ask("attention", q, facts, "keys and values are read once per group of query heads")


def _kv_attention(node: Node, ask: Ask) -> Found:
    q, k, v = (tensor(arg) for arg in node.args[:3])
    if q is None or k is None or v is None:
        return None, "its inputs are no tensors"
    facts = {
        "head_dim": k.shape[3],
        "value_dim": v.shape[3],
        "kv_heads": k.shape[1],
        "layout": node.args[6],
    }
    return ask("kv_attention", q, facts, "packed tiles are read as they are kept; longer steps unpack them")  # fmt: skip


def _linears(node: Node, ask: Ask) -> Found:
    x = tensor(node.args[0])
    weights: Any = node.args[1]
    first = tensor(weights[0])
    if x is None or first is None:
        return None, "its inputs are no tensors"
    if any(w.dtype != x.dtype for w in map(tensor, weights) if w is not None):
        return None, "weights and input differ in dtype"
    rows = x.numel() // x.shape[-1] if isinstance(x.numel(), int) and x.shape[-1] else None
    return ask(
        "linears", x, {"rows": rows}, "weights are read where they lie, all in one parallel region"
    )


def _packed(node: Node, ask: Ask) -> Found:
    x = tensor(node.args[0])
    if x is None:
        return None, "its input is no tensor"
    scheme, group, low, inputs = node.args[4:]
    facts = {"scheme": scheme, "group": group, "low": low, "inputs": inputs}
    return ask("packed_linears", x, facts, "packed weights are read once, in one parallel region")


def _ask(name: str, x: torch.Tensor, facts: dict[str, Any], note: str) -> Found:
    found = kernels.lookup(name, dtype=x.dtype, device=x.device, **facts)
    if found is not None:
        return found, note
    return None, kernels.why_not(name, dtype=x.dtype, device=x.device, **facts)


_FACTS: dict[str, Callable[[Node, Ask], Found]] = {
    "attention": _attention,
    "kv_attention": _kv_attention,
    "linears": _linears,
    "packed_linears": _packed,
}
