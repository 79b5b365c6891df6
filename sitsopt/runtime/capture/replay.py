"""Runs a graph in the order of a plan, node by node, each region as a span for the judge. For the CPU and for tests:
what a plan says of streams is not done here, its order is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ...graph.facts import source
from ...graph.regions.plan import RegionPlan
from .judge import place, span


def run_planned(gm: GraphModule, plan: RegionPlan, inputs: Sequence[Any]) -> Any:
    """The results of a graph for its inputs, computed in the plan's order."""
    values: dict[Node, Any] = {}
    nodes = {n.name: n for n in gm.graph.nodes}
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        values[node] = value
    for node in gm.graph.find_nodes(op="get_attr"):
        values[node] = _attribute(gm, str(node.target))
    regions = {region.name: [start.node for start in region.order] for region in plan.regions}
    for part in plan.order:
        with span(part) if part in regions else nullcontext():
            for name in regions.get(part, [part]):
                _run(nodes[name], values)
    found: Any = gm.graph.output_node().args[0]
    return map_arg(found, values.__getitem__)


def _run(node: Node, values: dict[Node, Any]) -> None:
    target: Any = node.target
    args: Any = map_arg(node.args, values.__getitem__)
    kwargs: Any = map_arg(node.kwargs, values.__getitem__)
    with place(source(node) or node.name):
        values[node] = target(*args, **kwargs)


def _attribute(gm: GraphModule, path: str) -> Any:
    found: Any = gm
    for part in path.split("."):
        found = getattr(found, part)
    return found
