"""Capture of a graph in which calls repeat: each distinct call is traced once, as a sample, and copied to where it stands.

Two calls are equal when the function, the constants and the layouts of the tensors are. All samples go through one
`aot_export_module`, each with inputs of its own, so that its ATen nodes are those behind its results. A write to an
argument comes back as the argument's new value, which later readers get. What cannot be told this way - symbolic sizes,
gradients, nested graphs, views that see a write - raises `Unsuited`, and the graph is traced whole.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_module
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .facts import is_view, storage_root
from .layouts import Marks, Unsuited, like, mark, takes_item

aten = torch.ops.aten
PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


@dataclass
class Fragment:
    """The ATen nodes of one call. `takes` stand for its tensors in order of reading; `results` are what it returns,
    `writes` the new values of what it writes, by position in `takes`."""

    takes: list[Node]
    nodes: list[Node] = field(default_factory=list)
    results: list[Node] = field(default_factory=list)
    writes: dict[int, Node] = field(default_factory=dict)


@dataclass
class Place:
    """Where a value of Dynamo's graph is now: a write moves it on."""

    node: Node


def sampled(gm: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, list[Node]]:
    """The functional graph, and the placeholders it writes; their new values are its last outputs.

    The graph lists Dynamo's results first. Raises Unsuited.
    """
    marks = Marks(gm, inputs)
    samples: dict[Any, Node] = {}
    keys = {node: marks.key(node) for node in marks.calls}
    for node, key in keys.items():
        samples.setdefault(key, node)
    fragments = _fragments(samples, marks)
    return _Copier(gm, inputs, marks).copy({n: fragments[k] for n, k in keys.items()})


# -- what each of them is -------------------------------------------------------------------------------


def _fragments(samples: dict[Any, Node], marks: Marks) -> dict[Any, Fragment]:
    graph, fakes = Graph(), list[Any]()
    taken: list[int] = []
    calls: list[Node] = []
    for node in samples.values():
        start = len(fakes)
        copies: dict[Node, Any] = {}
        for source in node.all_input_nodes:
            parts = [_placeholder(graph, fakes, like(m, marks.mode)) for m in marks.of[source]]
            value = source.meta["example_value"]
            copies[source] = parts[0] if isinstance(value, torch.Tensor) else tuple(parts)
        taken.append(len(fakes) - start)
        args, kwargs = map_arg(node.args, copies.get), map_arg(node.kwargs, copies.get)
        calls.append(graph.create_node(node.op, node.target, args, kwargs))
    _group_placeholders(graph)
    graph.output(tuple(c for c, n in zip(calls, samples.values(), strict=True) if marks.of[n]))
    try:
        traced, signature = aot_export_module(
            GraphModule({}, graph), fakes, trace_joint=False, pre_dispatch=True, decompositions={}
        )
    except Exception as error:
        raise Unsuited(f"its calls cannot be traced one by one: {error}") from error
    assert isinstance(traced, GraphModule)
    return dict(zip(samples, _split(traced, signature, taken, samples, marks), strict=True))


def _placeholder(graph: Graph, fakes: list[Any], fake: torch.Tensor) -> Node:
    fakes.append(fake)
    return graph.create_node("placeholder", f"in_{len(fakes)}")


def _group_placeholders(graph: Graph) -> None:
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    for node in list(graph.nodes):
        if first is not None and node.op == "placeholder" and first < node:
            first.prepend(node)


def _split(
    traced: GraphModule, signature: Any, taken: list[int], samples: dict[Any, Node], marks: Marks
) -> Iterator[Fragment]:
    """The traced graph, a fragment a sample."""
    places = [n for n in traced.graph.nodes if n.op == "placeholder"]
    results = list(traced.graph.output_node().args[0])  # type: ignore[arg-type]
    written = signature.user_inputs_to_mutate
    by_name = {p.name: p for p in places}
    news = {by_name[written[n.name]]: n for n in results[: len(written)]}
    fragments: list[Fragment] = []
    start, at = 0, len(written)
    for count, node in zip(taken, samples.values(), strict=True):
        takes = places[start : start + count]
        outs = results[at : at + len(marks.of[node])]
        start, at = start + count, at + len(outs)
        writes = {i: news[p] for i, p in enumerate(takes) if p in news}
        fragments.append(Fragment(takes, _behind({*outs, *writes.values()}), outs, writes))
        if tuple(map(layout_of, outs)) != marks.of[node]:
            raise Unsuited(f"{node.name} was traced with another layout")
        if any(layout_of(n) != layout_of(takes[i]) for i, n in writes.items()):
            raise Unsuited(f"{node.name} changes the layout of an argument")
    if len(places) != start or len(results) != at:
        raise Unsuited("the samples do not line up with what was traced")
    known = {n for f in fragments for n in f.nodes}
    for node in traced.graph.nodes:
        silent = node.op != "call_function" or node.target is aten._assert_tensor_metadata.default
        if not silent and node not in known:
            raise Unsuited(f"{node.target} is called for its effect")
    return iter(fragments)


def layout_of(node: Node) -> tuple[Any, ...]:
    """The layout of a captured value."""
    return mark(node.meta["val"])


def _behind(ends: set[Node]) -> list[Node]:
    """The nodes that compute these values, in graph order."""
    found: set[Node] = set()
    todo = [n for n in ends if n.op != "placeholder"]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        plain = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        if node.op != "call_function" or not plain:
            raise Unsuited(f"{node.target} is no plain op")
        found.add(node)
        todo.extend(n for n in node.all_input_nodes if n.op != "placeholder")
    return sorted(found)


# -- copying them to where they stand -------------------------------------------------------------------


class _Copier:
    """Builds the functional graph from the fragments, in the order of Dynamo's."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], marks: Marks) -> None:
        self.gm, self.inputs, self.marks = gm, inputs, marks
        self.graph = Graph()
        self.at: dict[Node, list[Place]] = {}
        self.stale: set[Node] = set()  # values that were written to since
        self.names: dict[Node, str] = {}

    def copy(self, fragments: dict[Node, Fragment]) -> tuple[GraphModule, list[Node]]:
        entries: list[tuple[Node, Place]] = []
        for i, node in enumerate(n for n in self.gm.graph.nodes if n.op == "placeholder"):
            made = self.graph.create_node("placeholder", f"arg{i}_1")
            made.meta["val"] = like(self.marks.of[node][0], self.marks.mode)
            self.at[node] = [Place(made)]
            entries.append((made, self.at[node][0]))
        for node in self.gm.graph.nodes:
            if node in fragments:
                self._paste(node, fragments[node])
            elif node.op == "call_function" and takes_item(node):
                self.at[node] = [self._item(node)]
        results: Any = map_arg(self.gm.graph.output_node().args[0], self._result)
        written = [(entry, place.node) for entry, place in entries if place.node is not entry]
        self._check_inputs({entry for entry, _ in written})
        self.graph.output((*results, *(new for _, new in written)))
        return GraphModule({}, self.graph), [entry for entry, _ in written]

    def _item(self, node: Node) -> Place:
        source, index = node.args
        if not isinstance(index, int) or not isinstance(source, Node):
            raise Unsuited(f"{node.name} takes several results at once")
        return self.at[source][index]

    def _result(self, node: Node) -> Node:
        (place,) = self.at[node]
        return self._fresh(place)

    def _fresh(self, place: Place) -> Node:
        if place.node in self.stale:
            raise Unsuited("a view is read after what it views was written to")
        return place.node

    def _paste(self, node: Node, fragment: Fragment) -> None:
        places = [p for n in node.all_input_nodes for p in self.at[n]]
        copies = {t: self._fresh(p) for t, p in zip(fragment.takes, places, strict=True)}
        meta = {key: node.meta[key] for key in PROVENANCE if key in node.meta}
        for inner in fragment.nodes:
            copies[inner] = self.graph.create_node(
                "call_function", inner.target, map_arg(inner.args, copies.__getitem__),
                map_arg(inner.kwargs, copies.__getitem__), self._name(inner),
            )  # fmt: skip
            copies[inner].meta = {**meta, "val": inner.meta["val"]}
        same = dict(zip(fragment.takes, places, strict=True))
        for i, new in fragment.writes.items():
            self._write(places[i], copies[new])
            same[new] = places[i]
        self.at[node] = [
            same[out] if out in same else Place(copies[out]) for out in fragment.results
        ]

    def _write(self, place: Place, new: Node) -> None:
        old = place.node
        if storage_root(old) is not old or storage_root(new) is not new or new in self.stale:
            raise Unsuited("a view is written to")
        if old.meta["val"].requires_grad:
            raise Unsuited("what is written to requires gradients")
        self.stale.add(old)
        todo = [old]
        while todo:
            seen = [u for u in todo.pop().users if is_view(u) and u not in self.stale]
            self.stale.update(seen)
            todo.extend(seen)
        place.node = new

    def _name(self, inner: Node) -> str:
        if inner not in self.names:
            self.names[inner] = re.sub(r"_\d+$", "", inner.name)
        return self.names[inner]

    def _check_inputs(self, written: set[Node]) -> None:
        """Whether an input that is written shares its memory with no other."""
        homes: dict[int, int] = {}
        for value in self.inputs:
            home = value.untyped_storage()._cdata
            homes[home] = homes.get(home, 0) + 1
        places = (n for n in self.graph.nodes if n.op == "placeholder")
        for node, value in zip(places, self.inputs, strict=True):
            if node in written and homes[value.untyped_storage()._cdata] > 1:
                raise Unsuited("inputs that share memory are written to")
