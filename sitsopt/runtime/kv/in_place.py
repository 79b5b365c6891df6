"""A cache's state is written where it lies: `copy_(state, new state of an op)` becomes the op that writes it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
ARGUMENTS = {1: 3, 2: 4}  # results of `kv_attention` that are new values of arguments


def write_in_place(gm: GraphModule) -> int:
    """Rewrites a restored graph; returns how many caches it writes so. What is read elsewhere stays as it is."""
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and _functional(n)]
    return sum(_rewrite(gm, node) for node in nodes)


def _functional(node: Node) -> bool:
    target = node.target
    return (
        getattr(target, "namespace", "") in ("sits", "sits_cpp")
        and target._schema.name.endswith("::kv_attention")  # type: ignore[union-attr]
    )


def _rewrite(gm: GraphModule, node: Node) -> bool:
    parts: dict[int, Node] = {}
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] in parts:
            return False
        parts[user.args[1]] = user  # type: ignore[index]
    writes = [_writes(parts.get(i), node.args[place]) for i, place in ARGUMENTS.items()]
    if not all(writes):
        return False
    target: Any = node.target
    space = getattr(torch.ops, target.namespace)
    with gm.graph.inserting_before(node):
        made = gm.graph.call_function(space.kv_attention_.default, node.args, dict(node.kwargs))
    made.meta = dict(node.meta)
    made.meta["val"] = node.meta["val"][0]
    for done in (n for chain in writes for n in reversed(chain)):
        gm.graph.erase_node(done)
    if 0 in parts:
        parts[0].replace_all_uses_with(made)
    for part in parts.values():
        gm.graph.erase_node(part)
    gm.graph.erase_node(node)
    return True


def _writes(new: Node | None, place: Any) -> list[Node]:
    """The copies by which `new` is written into `place`, if that is all that is done with it and nobody reads `place`
    behind the op; else nothing."""
    if new is None or not isinstance(place, Node):
        return []
    chain = [new]
    while chain[-1].target is not aten.copy_.default:
        users = list(chain[-1].users)
        if len(users) != 1 or users[0].target not in (aten.copy.default, aten.copy_.default):
            return []
        if users[0].args[:2] != (place, chain[-1]):
            return []
        chain += users
    source, order = new.args[0], {n: i for i, n in enumerate(place.graph.nodes)}
    assert isinstance(source, Node)
    late = any(order[u] > order[source] for u in place.users if u not in chain)
    return [] if late else chain[1:]
