"""Which writes to inputs Inductor is given, and which are done behind the graph it compiled.

Inductor turns scatters into writes in place and drops copies that look needless. Both go wrong when the old
contents, or the result of the scatter, are still wanted: `y.copy_(x); x.add_(1)`, `x[1:] = x[:-1].clone()`,
`z = x.slice_scatter(y); x.zero_()`, `x[0] = y; z = x.clone(); x[1] = y`. A write stays in the graph only in a shape
without any of that: a new value computed from scratch, or a chain of scatters into the input that nobody else
reads, as a cache does. The new values of all others become outputs, and are copied into their inputs after the call.

A compiled graph is right only for inputs that share storage as they did when it was compiled; Dynamo does not look.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph.capture import Captured
from ..graph.facts import is_view

aten = torch.ops.aten

# Ops that Inductor may turn into a write to their first argument.
SCATTERS = {
    "as_strided_scatter", "diagonal_scatter", "index_add", "index_copy", "index_fill", "index_put",
    "_index_put_impl", "_unsafe_index_put", "index_reduce", "masked_scatter", "put", "scatter", "scatter_add",
    "scatter_reduce", "select_scatter", "slice_scatter",
}  # fmt: skip
COPIES = {"clone", "lift_fresh_copy", "_to_copy", "to", "contiguous", "detach"}


def written_behind(captured: Captured) -> list[Node]:
    """The written inputs that the compiled graph must not write itself, in the order of `captured.written`."""
    written = captured.written
    if not written:
        return []
    outputs: Any = captured.gm.graph.output_node().args[0]
    results, news = outputs[: len(outputs) - len(written)], outputs[len(outputs) - len(written) :]
    facts = _Facts(captured, results)
    new_of = dict(zip(written, news, strict=True))
    values = dict(zip(captured.placeholders, captured.inputs, strict=True))
    todo = [
        p for p, new in new_of.items()
        if new is not p and (trained(values[p]) or not facts.plain(p, new))
    ]  # fmt: skip
    behind: set[Node] = set()
    while todo:  # whose old contents another one takes must not change before
        place = todo.pop()
        if place not in behind:
            behind.add(place)
            todo.extend(facts.origins(new_of[place]) & facts.written)
    return [p for p in written if p in behind]


def trained(value: Any) -> bool:
    """Whether a tensor is a leaf that collects gradients: only `no_grad` code may write to one."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _name(node: Node) -> str:
    target = node.target
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else ""


class _Facts:
    """What is asked about one graph: who scatters into what, and which inputs a value depends on."""

    def __init__(self, captured: Captured, results: Iterable[Any]) -> None:
        self.written = set(captured.written)
        bit = {p: 1 << i for i, p in enumerate(captured.written)}
        self.depends: dict[Node, int] = {}
        self.scatters: dict[Node, set[Node]] = {}  # what is written to, to the scatters that do it
        for node in captured.gm.graph.nodes:
            mask, name = bit.get(node, 0), _name(node)
            for source in node.all_input_nodes:
                if name != "copy" or source is not node.args[0]:  # of that, only the shape is read
                    mask |= self.depends[source]
            self.depends[node] = mask
            if name in SCATTERS:
                for base in self.origins(node.args[0]):
                    self.scatters.setdefault(base, set()).add(node)
        self.bit = bit
        returned = [self.origins(n) for n in results if isinstance(n, Node)]
        self.returned = set().union(*returned)  # what a result of the call may turn out to be

    def origins(self, node: Node) -> set[Node]:
        """The values that this one may turn out to be, once needless copies are dropped: it itself, what it is
        a view or copy of, what was scattered into and what was scattered."""
        found, todo = set(), [node]
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found.add(node)
            if node.op != "call_function":
                continue
            name = _name(node)
            if name == "copy":
                todo.extend(node.all_input_nodes[-1:])
            elif name in SCATTERS:
                todo.extend(node.all_input_nodes)
            elif is_view(node) or name in COPIES:
                todo.extend(node.all_input_nodes[:1])
        return found

    def plain(self, place: Node, new: Node) -> bool:
        """Whether writing `new` into `place` inside the graph is known to come out right."""
        link, chain = new, set()
        while _name(link) in SCATTERS:
            chain.add(link)
            base = link.args[0]
            assert isinstance(base, Node)
            others = [n for n in link.all_input_nodes if n is not base]
            if link in self.returned or any(self.depends[n] & self.bit[place] for n in others):
                return False
            if base is not place and set(base.users) != {link}:
                return False
            link = base
        if chain and link is not place:
            return False
        reached = self.scatters.get(place, set()).union(*(self.scatters.get(n, ()) for n in chain))
        taken = self.origins(new) & self.written
        return reached <= chain and taken <= ({place} if chain else set())


@dataclass
class Behind:
    """Updates after the call: which of the inputs (indices into `Captured.inputs`)."""

    places: list[int]

    def write(self, inputs: Sequence[Any], news: Sequence[torch.Tensor]) -> None:
        """Copy each new value into its input. A value that lies in one of the inputs is taken out first."""
        places = [inputs[i] for i in self.places]
        homes = {p.untyped_storage().data_ptr() for p in places}
        values = [n.clone() if n.untyped_storage().data_ptr() in homes else n for n in news]
        for place, value in zip(places, values, strict=True):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not trained(place)):
                place.copy_(value)


# Ops of a graph as Dynamo wrote it that Inductor may get wrong when they write to an input.
ROUGH = {"setitem", "copy_", "zero_", "fill_", "masked_fill_", "set_"}


def rough_writes(gm: GraphModule) -> bool:
    """Whether a graph of Dynamo's writes to its inputs in a way that only eager is known to get right."""
    homes = {_home(n.meta.get("example_value")) for n in gm.graph.nodes if n.op == "placeholder"}
    return any(
        isinstance(place, Node) and _home(place.meta.get("example_value")) in homes - {0}
        for place in map(_roughly_written, gm.graph.nodes)
    )


def _roughly_written(node: Node) -> Any:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if "out" in node.kwargs:
        return node.kwargs["out"]
    return node.args[0] if name in ROUGH and node.args else None


def _home(value: Any) -> int:
    """Which storage a tensor lies in; 0 for one without, and for anything else."""
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return int(value.untyped_storage()._cdata) if strided else 0


class Sharing:
    """Which inputs of a graph share storage. Parameters are left out: nothing is written to them.

    fixed: all sizes are. Then inputs that lie where the last ones lay share what those shared, and only their
    addresses are looked at.
    """

    def __init__(self, inputs: Sequence[Any], fixed: bool = False) -> None:
        self.places = [
            i for i, t in enumerate(inputs)
            if isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter) and _home(t)
        ]  # fmt: skip
        self.fixed = fixed
        self.pattern = self._pattern(inputs)

    def _pattern(self, inputs: Sequence[Any]) -> list[int]:
        first: dict[int, int] = {}
        return [first.setdefault(inputs[i].untyped_storage()._cdata, i) for i in self.places]

    def guard(
        self, compiled: Callable[..., Any], otherwise: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`compiled` for inputs that share storage as these do, `otherwise` for any others."""
        if len(self.places) < 2:
            return compiled
        pick, address = operator.itemgetter(*self.places), torch.Tensor.data_ptr
        fixed, seen = self.fixed, [-1]

        def call(*args: Any) -> Any:
            nonlocal seen
            lie = [*map(address, pick(args))] if fixed else seen
            if lie != seen or not fixed:
                if self._pattern(args) != self.pattern:
                    return otherwise(*args)
                seen = lie
            return compiled(*args)

        return call
