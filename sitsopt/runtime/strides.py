"""Results in the layout that Dynamo saw, where no compiler restores it.

A functional op may give rows where the write that it stands for kept the layout of its input: `masked_fill` of a
transposed tensor does, `masked_fill_` does not. Inductor copies its results into the layout expected of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph.capture import Captured
from ..graph.facts import storage_root, tensor

aten = torch.ops.aten


def keep_strides(captured: Captured, gm: GraphModule) -> None:
    """Copy each result of `captured` whose strides differ from those of `gm`, Dynamo's graph, into those. Left as
    they are: results that share storage with anything else that lives on, and sizes that are no numbers."""
    output = captured.gm.graph.output_node()
    wanted: Any = gm.graph.output_node().args[0]
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    homes = Counter(storage_root(n) for n in set(results) if isinstance(n, Node))
    copies: dict[Node, Node] = {}
    for i, source in enumerate(wanted):
        node = results[i]
        if not isinstance(node, Node) or not isinstance(source, Node):
            continue
        fresh = storage_root(node).op == "call_function" and homes[storage_root(node)] == 1
        if fresh and (strides := _other_strides(node, source.meta.get("example_value"))):
            copies[node] = copies.get(node) or _copied(captured.gm, node, strides)
            results[i] = copies[node]
    output.args = (tuple(results),)


def _other_strides(node: Node, wanted: Any) -> tuple[int, ...] | None:
    """The strides to give a value, or None where it has them, or where they cannot be told."""
    found = tensor(node)
    if found is None or not isinstance(wanted, torch.Tensor):
        return None
    if not found.layout is wanted.layout is torch.strided:
        return None
    numbers = (*found.shape, *found.stride(), *wanted.shape, *wanted.stride())
    if any(type(n) is not int for n in numbers) or found.shape != wanted.shape:
        return None
    sizes = zip(found.shape, found.stride(), wanted.stride(), strict=True)
    differ = found.numel() and any(size > 1 and a != b for size, a, b in sizes)
    return tuple(wanted.stride()) if differ else None


def _copied(gm: GraphModule, node: Node, strides: tuple[int, ...]) -> Node:
    value = node.meta["val"]
    with gm.graph.inserting_before(gm.graph.output_node()):
        empty = gm.graph.call_function(
            aten.new_empty_strided.default, (node, tuple(value.shape), strides)
        )
        copy = gm.graph.call_function(aten.copy.default, (empty, node))
    empty.meta["val"] = copy.meta["val"] = value.new_empty_strided(value.shape, strides)
    return copy
