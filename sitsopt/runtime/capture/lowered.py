"""Regions in the lowering of a graph on a GPU: planned and proved before it is closed, then captured as one piece where
that is all of it, else cut and compiled piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from ...graph.capture import Captured
from ...graph.facts import tensor
from ...graph.regions.check import check
from ...graph.regions.plan import RegionPlan
from ...graph.regions.planner import plan_regions
from ...rewrite.record import GraphRecord
from ...spec.region import RegionFile
from ...spec.target import Target
from .choose import given_up, plan_for, stays
from .costs import costs_of, limit
from .cuda import Cuda
from .executor import Limits
from .pieces import Program, is_whole

if TYPE_CHECKING:
    from ..lower import Finished, Lowering


@dataclass
class Lowered:
    """A proved plan on its way to a callable. held: names of the graph's inputs that stay where they lie."""

    plan: RegionPlan
    rule: RegionFile
    target: Target
    held: frozenset[str]
    own: frozenset[str]  # names of all inputs before lowering adds folded values
    record: GraphRecord

    @property
    def whole(self) -> bool:
        """Whether the graph is compiled and captured in one piece."""
        return is_whole(self.plan)

    def limits(self, finished: Finished) -> Limits:
        """For the whole compiled graph; folded values stay where they lie too."""
        names = [n.name for n in finished.gm.graph.find_nodes(op="placeholder")]
        held = frozenset(i for i, n in enumerate(names) if n in self.held or n not in self.own)
        return Limits.of(self.rule, held, limit(self.target, self.rule))

    def program(self, finished: Finished, lowering: Lowering) -> Program | None:
        """The closed graph cut into pieces, after a plan of its own; None where it is captured as a whole, or where
        it cannot be cut, which is noted."""
        if self.whole:
            return None
        graph = finished.gm.graph
        inputs = graph.find_nodes(op="placeholder")
        held = {n for n in inputs if n.name in self.held or n.name not in self.own}
        self.plan = plan = plan_regions(
            graph, self.rule, costs_of(self.target, self.rule), held=held
        )
        problems = check(plan, graph, self.rule, held=held)
        varies = any(isinstance(value, int | torch.SymInt) for value in finished.values)
        why = plan.refused or next(iter(problems), "")
        why = why or ("sizes vary, and pieces are compiled for fixed ones" if varies else "")
        self.record.regions = plan
        if why:
            self.plan = RegionPlan(plan.rule, refused=why)
            self.record.capture_notes.append(why)
        if why or self.whole:
            return None
        sides = max((region.streams - 1 for region in plan.regions), default=0)
        notes = self.record.capture_notes
        return Program(
            finished.gm, plan, Cuda(sides=sides), _compiler(lowering), self._limits, notes
        )

    def _limits(self, held: frozenset[int], kept: frozenset[int]) -> Limits:
        return Limits.of(self.rule, held, limit(self.target, self.rule), kept)


def plan_captures(
    captured: Captured, rules: Sequence[RegionFile], target: Target | None, lowering: Lowering, record: GraphRecord
) -> Lowered | None:  # fmt: skip
    """Plan the regions of a graph that is compiled for this machine's GPU; None, and why in the record, where it is
    not to be captured."""
    if not rules or target is None or target.emitter != "triton":
        return None
    plan = plan_for(captured, rules, target)
    if plan is None:
        return None
    record.regions = plan
    if why := plan.refused or _why_not(captured, lowering):
        record.capture_notes += [why] if plan.fits else []
        if not plan.refused:
            record.regions = None if lowering.grad else given_up(captured, plan.rule, why)
        return None
    rule = next(one for one in rules if one.name == plan.rule)
    held, own = frozenset(n.name for n in stays(captured)), frozenset(n.name for n in captured.placeholders)  # fmt: skip
    return Lowered(plan, rule, target, held, own, record) if plan.regions else None


def _why_not(captured: Captured, lowering: Lowering) -> str:
    if lowering.grad:
        return "gradients are recorded"
    if not lowering.compiles:
        return f"lowering: {lowering.how} runs op by op"
    devices = {t.device for n in captured.placeholders if n.users and (t := tensor(n)) is not None}
    if {device.type for device in devices} != {"cuda"}:
        return f"its tensors are on {', '.join(sorted(map(str, devices))) or 'no device'}"
    return "" if len(devices) == 1 else "its tensors are on several GPUs"


def _compiler(lowering: Lowering) -> Callable[[GraphModule, list[Any]], Callable[..., Any]]:
    """Compiles a piece for the values it gets, outside of Dynamo."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode

    def compile_piece(gm: GraphModule, values: list[Any]) -> Callable[..., Any]:
        from ..lower import compile_graph

        with tracing(TracingContext(FakeTensorMode())), torch.no_grad():
            return compile_graph(gm, values, lowering)

    return compile_piece
