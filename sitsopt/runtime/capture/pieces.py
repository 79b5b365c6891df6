"""A graph cut as its plan says: a piece for each stretch on one stream between two events, each compiled alone.

A graph that is one region on one stream is not cut: it is compiled as a whole, and the whole is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...graph.facts import storage_root
from ...graph.regions.facts import facts_of
from ...graph.regions.plan import BEGIN, Region, RegionPlan
from .executor import Captures, Device, Limits

Compile = Callable[[GraphModule, list[Any]], Callable[..., Any]]


@dataclass
class Piece:
    """Nodes that run in a row on one stream. It waits for events, then runs, then records one."""

    nodes: list[Node]
    stream: int = 0
    waits: tuple[str, ...] = ()
    records: str = ""
    gm: GraphModule | None = None
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    run: Callable[..., Any] | None = None


@dataclass
class Part:
    """A region, or what runs between two: its pieces, what it reads, and what is read behind it."""

    pieces: list[Piece]
    region: Region | None
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    call: Callable[..., Any] | None = None


def is_whole(plan: RegionPlan) -> bool:
    """Whether all of a graph is one region on one stream."""
    return len(plan.regions) == 1 and not plan.outside and plan.regions[0].streams == 1


def cut(gm: GraphModule, plan: RegionPlan) -> list[Part]:
    """The parts of a graph in the order in which they run."""
    nodes = {n.name: n for n in gm.graph.nodes}
    regions = {region.name: region for region in plan.regions}
    parts: list[Part] = []
    for name in plan.order:
        region = regions.get(name)
        if region is not None:
            parts.append(Part(_pieces(region, nodes), region))
        elif parts and parts[-1].region is None:
            parts[-1].pieces[0].nodes.append(nodes[name])
        else:
            parts.append(Part([Piece([nodes[name]])], None))
    pieces, changing = [p for part in parts for p in part.pieces], facts_of(gm.graph).written
    for piece in pieces:
        piece.inputs = [n.name for n in _reads(piece, changing) if n.op != "get_attr" and not _again(n, changing)]  # fmt: skip
    results = {n.name for n in gm.graph.output_node().all_input_nodes}
    for piece in pieces:
        wanted = results.union(*(other.inputs for other in pieces if other is not piece))
        piece.outputs = [n.name for n in piece.nodes if n.name in wanted]
        _extract(gm, piece, _reads(piece, changing))
    for part in parts:
        mine = {n.name for piece in part.pieces for n in piece.nodes}
        part.inputs = list(dict.fromkeys(i for p in part.pieces for i in p.inputs if i not in mine))
        wanted = results.union(*(p.inputs for other in parts if other is not part for p in other.pieces))  # fmt: skip
        part.outputs = [o for p in part.pieces for o in p.outputs if o in wanted]
    return parts


def _pieces(region: Region, nodes: dict[str, Node]) -> list[Piece]:
    recorded = {event.after: event.name for event in region.events}
    pieces: list[Piece] = []
    for start in region.order:
        last = pieces[-1] if pieces else None
        if last is None or start.waits or last.stream != start.stream or last.records:
            last = Piece([], start.stream, start.waits)
            pieces.append(last)
        last.nodes.append(nodes[start.node])
        last.records = recorded.get(start.node, "")
    return pieces


def _again(node: Node, changing: frozenset[Node]) -> bool:
    """Whether a piece makes a value of its own anew rather than being given it: a view, of memory that nobody writes to.
    A view of an input must be no result of a region: what is captured gives copies."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    aliases = [a.alias_info is not None and not a.alias_info.is_write for a in target._schema.returns]  # fmt: skip
    return aliases == [True] and storage_root(node) not in changing


def _reads(piece: Piece, changing: frozenset[Node]) -> list[Node]:
    """What a piece reads from outside, in an order in which it can be made: views are followed back."""
    inside, found = set(piece.nodes), dict[Node, None]()

    def visit(node: Node) -> None:
        if node in inside or node in found:
            return
        if _again(node, changing):
            for base in node.all_input_nodes:
                visit(base)
        found[node] = None

    for node in piece.nodes:
        for one in node.all_input_nodes:
            visit(one)
    return list(found)


def _extract(gm: GraphModule, piece: Piece, reads: list[Node]) -> None:
    """The piece as a graph of its own. Attributes are read from the whole one."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    given = set(piece.inputs)
    for node in reads:  # inputs first
        if node.op == "get_attr":
            copies[node] = graph.get_attr(str(node.target))
        elif node.name in given:
            copies[node] = graph.placeholder(node.name)
        else:
            continue
        copies[node].meta = dict(node.meta)
    for node in [*(n for n in reads if n not in copies), *piece.nodes]:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    names = {n.name: n for n in piece.nodes}
    graph.output(tuple(copies[names[name]] for name in piece.outputs))
    graph.lint()
    piece.gm = GraphModule(gm, graph)


class Program:
    """A cut graph that is called like the whole. Pieces are compiled at the first call, for the values they get;
    `held` are names of the graph's inputs that stay where they lie, `limits` makes the limits of a region."""

    def __init__(
        self, gm: GraphModule, plan: RegionPlan, device: Any, compile_piece: Compile,
        limits: Callable[[frozenset[int], frozenset[int]], Limits], notes: list[str] | None = None,
    ) -> None:  # fmt: skip
        self.parts = cut(gm, plan)
        self.device, self.compile = device, compile_piece
        self.inputs = [n.name for n in gm.graph.find_nodes(op="placeholder")]
        found: Any = gm.graph.output_node().args[0]
        self.results = [one.name if isinstance(one, Node) else one for one in found]
        self.leaving = {one for one in self.results if isinstance(one, str)}
        self.static: set[str] = set()
        for part in self.parts:
            self._prepare(part, limits, notes)

    def _prepare(self, part: Part, limits: Any, notes: list[str] | None) -> None:
        def run(*args: Any) -> list[Any]:
            return self._run(part, dict(zip(part.inputs, args, strict=True)))

        part.call = run
        if part.region is None:
            return
        stays = {one.name for one in part.region.inputs if one.held} | self.static
        held = frozenset(i for i, name in enumerate(part.inputs) if name in stays)
        kept = frozenset(i for i, name in enumerate(part.outputs) if name not in self.leaving)
        self.static |= {part.outputs[i] for i in kept}
        device: Device = self.device
        part.call = Captures(run, limits(held, kept), device, notes)

    def __call__(self, *args: Any) -> list[Any]:
        values: dict[str, Any] = dict(zip(self.inputs, args, strict=True))
        for part in self.parts:
            assert part.call is not None
            given = [values[name] for name in part.inputs]
            values.update(zip(part.outputs, part.call(*given), strict=True))
        return [values[one] if isinstance(one, str) else one for one in self.results]

    def _run(self, part: Part, values: dict[str, Any]) -> list[Any]:
        """The pieces of a part on their streams. Every value lives until the end: another stream may still read it
        when this one has let go of it."""
        events: dict[str, Any] = {BEGIN: self.device.record()}
        for piece in part.pieces:
            with self.device.on(piece.stream):
                self.device.wait([events[name] for name in piece.waits])
                given = [values[name] for name in piece.inputs]
                if piece.run is None:
                    assert piece.gm is not None
                    piece.run = self.compile(piece.gm, given)
                values.update(zip(piece.outputs, piece.run(*given), strict=True))
                if piece.records:
                    events[piece.records] = self.device.record()
        if part.region is not None:
            self.device.wait([events[name] for name in part.region.joins])
        return [values[name] for name in part.outputs]
