"""Graphs that Inductor's own attention patterns would misread.

Those patterns ignore every number in a graph. They take `permute(0, 2, 3, 1)` for a transpose, a softmax over any dim
for one over the last, a fill of -1e9 for -inf and `mask == 1` for `mask == 0`; rows that may attend nothing turn from
NaN to zeros, and a scale that is a tensor fails to compile. Attention that our rules recognise never reaches
them. For what is left, written out in products and a softmax, Inductor's pattern matcher is switched off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "__matmul__"}
SOFTMAXES = {"softmax", "_softmax", "_safe_softmax"}
ENDS = {"linear", "conv2d", "embedding", "layer_norm", "softmax", "scaled_dot_product_attention"}
REACH = 24  # ops between a product and the softmax of its scores


def inductor_patches(gm: GraphModule) -> dict[str, Any]:
    """Settings under which Inductor compiles this graph, and those inside it, as eager runs it."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, GraphModule)]
    written_out = any(_scores(n) or _attention_by_hand(n) for g in graphs for n in g.nodes)
    return {"pattern_matcher": False} if written_out else {}


def _name(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _scores(node: Node) -> bool:
    """Whether a node is the softmax of a product, in ATen or as Dynamo writes it."""
    if node.op not in ("call_function", "call_method") or _name(node) not in SOFTMAXES:
        return False
    todo, seen = node.all_input_nodes[:1], set[Node]()
    while todo and len(seen) < REACH:
        node = todo.pop(0)
        name = _name(node)
        if name in PRODUCTS:
            return True
        if node not in seen and name not in ENDS:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return False


def _attention_by_hand(node: Node) -> bool:
    """A `sits.attention` whose reference is no single op: it keeps softmax's NaN."""
    if node.op != "call_function" or node.target is not torch.ops.sits.attention.default:
        return False
    safe = node.args[8] if len(node.args) > 8 else node.kwargs.get("safe", True)
    return not safe
