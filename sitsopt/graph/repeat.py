"""A model is one layer, many times: find equal layers in a finished graph and keep one copy of their code.

Nodes are grouped by the numbered module they come from (`model.layers.7`). Groups whose canonical text is equal -
ops, constants, shapes and dtypes, but neither names nor which parameter is read - become calls of one subgraph
(`invoke_subgraph`), which Inductor compiles once.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .facts import module_path, storage_root, val

aten = torch.ops.aten
LEAST = 2  # equal layers worth a subgraph


@dataclass
class Layer:
    """The nodes of one numbered module in graph order, what they read from outside, what is read outside."""

    path: str
    nodes: list[Node]
    operands: list[Node]
    results: list[Node]

    def text(self) -> str:
        """The layer without names: equal texts mean equal code."""
        names = {n: f"in{i}" for i, n in enumerate(self.operands)}
        lines = [f"{names[n]}: {shape_of(n)}" for n in self.operands]
        for i, node in enumerate(self.nodes):
            names[node] = f"%{i}"
            everything: Any = (node.args, dict(node.kwargs))
            name: Any = lambda n: _Name(names[n])  # noqa: E731
            args, kwargs = map_arg(everything, name)
            lines.append(f"%{i} = {node.target} {args!r} {kwargs!r} -> {shape_of(node)}")
        lines.append(f"return {[names[n] for n in self.results]}")
        return "\n".join(lines)


class _Name:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def shape_of(node: Node) -> str:
    """The fake value of a node as text: dtype, sizes, strides; symbolic sizes by their symbols."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}{value.device}{value.requires_grad}"
    if isinstance(value, (list, tuple)):
        return str([shape_of(_Fake(v)) for v in value])  # type: ignore[arg-type]
    return str(value)


class _Fake:
    def __init__(self, value: Any) -> None:
        self.meta = {"val": value}


def layer_of(node: Node) -> str:
    """`model.layers.7` for a node somewhere inside it: up to the first number in its module path."""
    found = re.match(r"(.*?\.\d+)(\.|$)", module_path(node))
    return found.group(1) if found else ""


def outline(gm: GraphModule) -> list[list[str]]:
    """Rewrite `gm` so that equal layers call one subgraph. Returns the groups of module paths made one.

    A layer stays as it is when a value would have to leave it and come back, or when nothing equals it.
    """
    groups = _groups(gm.graph)
    if not groups:
        return []
    calls: dict[Node, tuple[Layer, str]] = {}
    for i, group in enumerate(groups):
        name = f"repeated_{i}"
        gm.register_module(name, _subgraph(group[0]))
        for layer in group:
            calls.update(dict.fromkeys(layer.nodes, (layer, name)))
    _rebuild(gm, calls)
    return [[layer.path for layer in group] for group in groups]


def equal_layers(graph: Graph) -> list[list[str]]:
    """The module paths of the layers that `outline` would make one; the graph stays as it is."""
    return [[layer.path for layer in group] for group in _groups(graph)]


def _groups(graph: Graph) -> list[list[Layer]]:
    by_text: dict[str, list[Layer]] = defaultdict(list)
    for layer in _layers(graph):
        by_text[layer.text()].append(layer)
    return [group for group in by_text.values() if len(group) >= LEAST]


def _layers(graph: Graph) -> list[Layer]:
    owner = _owners(graph)
    nodes: dict[str, list[Node]] = defaultdict(list)
    for node, path in owner.items():
        nodes[path].append(node)
    layers = [_layer(path, group, owner) for path, group in nodes.items()]
    rank = {n: i for i, n in enumerate(graph.nodes)}
    return [layer for layer in layers if _convex(layer, rank) and _fresh(layer)]


def _owners(graph: Graph) -> dict[Node, str]:
    """The layer of each op. A write to an input belongs to the layer that made the value, if nobody else reads the
    input; a view or a constant without a module of its own goes with its only reader. What only counts is nobody's."""
    owner: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.copy_.default:
            place, new = node.args
            path = owner.get(new, "")
            if path and all(u is node or owner.get(u) == path for u in place.users):
                owner[node] = path
        elif layer_of(node) and not _counts(node):
            owner[node] = layer_of(node)
    return owner


def _counts(node: Node) -> bool:
    """Whether a node is a number made of sizes: a cache that counts its tokens in Python, layer by layer."""
    return isinstance(val(node), (int, torch.SymInt)) and node.target is not operator.getitem


def _layer(path: str, nodes: list[Node], owner: dict[Node, str]) -> Layer:
    inside = set(nodes)
    operands = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    results = [n for n in nodes if any(u not in inside for u in n.users)]
    return Layer(path, nodes, list(operands), results)


def _convex(layer: Layer, rank: dict[Node, int]) -> bool:
    """Whether the layer can run at one point: no path leaves it and comes back in."""
    inside, last = set(layer.nodes), max(rank[n] for n in layer.nodes)
    todo = [u for n in layer.results for u in n.users if u not in inside]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if rank[node] > last:
            continue
        for user in node.users:
            if user in inside:
                return False
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return True


def _fresh(layer: Layer) -> bool:
    """Whether no result is a view of something the layer was given: subgraphs hand out new values only."""
    inside = set(layer.nodes)
    return all(storage_root(n) in inside for n in layer.results)


def _subgraph(layer: Layer) -> GraphModule:
    graph, copies = Graph(), {}
    for i, node in enumerate(layer.operands):
        copies[node] = graph.placeholder(f"in_{i}")
        copies[node].meta = dict(node.meta)
    for node in layer.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] for n in layer.results))
    return GraphModule({}, graph)


def _rebuild(gm: GraphModule, calls: dict[Node, tuple[Layer, str]]) -> None:
    """A new graph with a call for each layer, in an order that respects every read and every write."""
    old, new = gm.graph, Graph()
    copies: dict[Node, Node] = {}
    subgraphs: dict[str, Node] = {}
    for unit in _order(old, calls):
        if isinstance(unit, Node):
            copies[unit] = new.node_copy(unit, lambda n: copies[n])
            continue
        name = calls[unit.nodes[0]][1]
        if name not in subgraphs:
            subgraphs[name] = new.get_attr(name)
        call = new.call_function(
            torch.ops.higher_order.invoke_subgraph,
            (subgraphs[name], name, *(copies[n] for n in unit.operands)),
        )
        call.meta["val"] = tuple(n.meta.get("val") for n in unit.results)
        for i, node in enumerate(unit.results):
            copies[node] = new.call_function(operator.getitem, (call, i))
            copies[node].meta = dict(node.meta)
    gm.graph = new


def _order(graph: Graph, calls: dict[Node, tuple[Layer, str]]) -> list[Node | Layer]:
    """Units (single nodes, and layers) sorted so that each comes behind what it reads; ties keep graph order.

    A write to an input comes behind every other reader of that input.
    """
    units: dict[int, Node | Layer] = {}
    unit_of: dict[Node, int] = {}
    for i, node in enumerate(graph.nodes):
        layer = calls[node][0] if node in calls else None
        unit = unit_of[layer.nodes[0]] if layer and layer.nodes[0] in unit_of else i
        unit_of[node] = unit
        units.setdefault(unit, layer or node)
    needs: dict[int, set[int]] = {u: set() for u in units}
    for node in graph.nodes:
        mine = unit_of[node]
        needs[mine].update(unit_of[n] for n in node.all_input_nodes)
        if node.op == "call_function" and node.target is aten.copy_.default:
            needs[mine].update(unit_of[u] for u in node.args[0].users)
        needs[mine].discard(mine)
    needs[unit_of[graph.output_node()]].update(
        u for u in units if u != unit_of[graph.output_node()]
    )
    return [units[u] for u in _sorted(needs)]


def _sorted(needs: dict[int, set[int]]) -> list[int]:
    import heapq

    readers: dict[int, list[int]] = defaultdict(list)
    for unit, wanted in needs.items():
        for other in wanted:
            readers[other].append(unit)
    left = {u: len(w) for u, w in needs.items()}
    ready = [u for u, n in left.items() if n == 0]
    heapq.heapify(ready)
    out: list[int] = []
    while ready:
        unit = heapq.heappop(ready)
        out.append(unit)
        for reader in readers[unit]:
            left[reader] -= 1
            if left[reader] == 0:
                heapq.heappush(ready, reader)
    if len(out) != len(needs):
        raise ValueError("the layers of the graph depend on each other in a circle")
    return out
