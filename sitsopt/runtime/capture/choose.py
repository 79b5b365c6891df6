"""The region rules of a recipe on one graph: planned, proved, and what is not sure left outside with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ...graph.capture import Captured
from ...graph.facts import module_path, source
from ...graph.regions.check import check
from ...graph.regions.facts import op_name
from ...graph.regions.plan import Outside, RegionPlan
from ...graph.regions.planner import plan_regions
from ...spec.region import RegionFile
from ...spec.target import Target
from .costs import costs_of


def plan_for(captured: Captured, rules: Sequence[RegionFile], target: Target) -> RegionPlan | None:
    """The plan of the first rule that is meant for a graph; that of the first rule, which says why not, where none is.
    None without a rule."""
    plans: list[RegionPlan] = []
    for rule in rules:
        plan = proved(captured, rule, target)
        if plan.fits:
            return plan
        plans.append(plan)
    return plans[0] if plans else None


def proved(captured: Captured, rule: RegionFile, target: Target) -> RegionPlan:
    """A plan that the checker accepts. One that it does not is given up, with what it found."""
    graph, costs, held = captured.gm.graph, costs_of(target, rule), stays(captured)
    plan = plan_regions(graph, rule, costs, captured.written, held)
    problems = check(plan, graph, rule, captured.written, held)
    if not problems:
        return plan
    return given_up(captured, rule.name, "the plan was not proved: " + "; ".join(problems[:3]))


def given_up(captured: Captured, rule: str, why: str) -> RegionPlan:
    """A plan in which everything is outside, for one reason."""
    calls = [n for n in captured.gm.graph.nodes if n.op == "call_function"]
    outside = [Outside(n.name, op_name(n), why, module_path(n), source(n)) for n in calls]
    return RegionPlan(rule, [], outside, [one.node for one in outside], why)


def stays(captured: Captured) -> set[Node]:
    """Inputs that lie at one address from call to call: parameters, buffers, caches (what the graph writes to) and the
    graph's own constants."""
    return {*captured.params, *captured.written, *captured.placeholders[: captured.attached]}
