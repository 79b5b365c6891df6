"""Graphs written in the notation of rules, and what one inline rule does to them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from sitsopt.graph import ops as _ops  # noqa: F401  registers the sits:: ops
from sitsopt.graph.build import Builder
from sitsopt.rewrite.edit import run
from sitsopt.rewrite.engine import Applied, Settings, rewrite
from sitsopt.rewrite.record import GraphRecord, Miss
from sitsopt.rewrite.view import GraphView
from sitsopt.spec.errors import Pos
from sitsopt.spec.notation import parse_program
from sitsopt.spec.rule import Rule, load_rule


def rule(text: str, rule_id: str = "fuse/inline") -> Rule:
    """A rule from its YAML text, without its summary."""
    return load_rule("inline.yaml", rule_id, "summary: A rule of a test.\n" + text)


@dataclass
class Sample:
    """A graph, the values it runs on, and what a rewrite did to it."""

    gm: GraphModule
    view: GraphView
    inputs: list[torch.Tensor]
    before: GraphModule
    record: GraphRecord = field(default_factory=lambda: GraphRecord("sample"))
    applied: list[Applied] = field(default_factory=list)

    def rewrite(self, *rules: Rule, **settings: Any) -> Sample:
        chosen = Settings(misses=settings.pop("misses", True), **settings)
        self.applied += rewrite(self.view, rules, chosen, self.record)
        return self

    @property
    def fired(self) -> int:
        return len(self.applied)

    def reasons(self) -> set[str]:
        return {m.reason for m in self.record.misses}

    def miss(self) -> Miss:
        """The only miss."""
        (found,) = self.record.misses
        return found

    def node(self, name: str) -> Node:
        return next(n for n in self.gm.graph.nodes if n.name == name)

    def swept(self) -> GraphModule:
        self.view.sweep()
        self.gm.graph.lint()
        self.gm.recompile()
        return self.gm

    def right(self, tolerance: float = 1e-5) -> bool:
        """Whether the rewritten graph computes what the first one did."""
        with torch.no_grad():
            wanted, got = (
                g(*[t.clone() for t in self.inputs]) for g in (self.before, self.swept())
            )
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
        return True


def sample(
    program: str,
    params: tuple[str, ...] = (),
    states: tuple[str, ...] = (),
    dynamic: dict[str, tuple[int, ...]] | None = None,
    **inputs: torch.Tensor | tuple[int, ...],
) -> Sample:
    """The graph of a program over named inputs: tensors, or shapes of random ones. `dynamic` names the dims
    of inputs that are symbols."""
    torch.manual_seed(0)
    graph, dynamic = Graph(), dynamic or {}
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    real = {k: v if isinstance(v, torch.Tensor) else torch.randn(v) for k, v in inputs.items()}
    env: dict[str, Any] = {}
    for name, value in real.items():
        env[name] = graph.placeholder(name)
        env[name].meta["val"] = _fake(mode, name, value, dynamic.get(name, ()))
    parsed = parse_program(
        program, lambda line, column: Pos("sample", line + 1, column + 1), [*inputs], in_place=True
    )
    graph.output(tuple(run(parsed, env, Builder(graph, mode))))
    gm = GraphModule({}, graph)
    places = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    view = GraphView(gm, [places[p] for p in params], [places[s] for s in states])
    return Sample(gm, view, list(real.values()), copy.deepcopy(gm))


def _fake(
    mode: FakeTensorMode, name: str, value: torch.Tensor, dims: tuple[int, ...]
) -> torch.Tensor:
    if not dims:
        return mode.from_tensor(value)
    from torch._dynamo.source import ConstantSource

    sizes = [DimDynamic.DYNAMIC if i in dims else DimDynamic.STATIC for i in range(value.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(name))
