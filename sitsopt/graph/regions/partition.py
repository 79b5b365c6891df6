"""Which nodes run together: the fewest regions that no path leaves and enters again.

Every node gets a level: even ones are regions, odd ones lie between them. A node that may be captured goes to the
lowest even level that no need of its own is above, one that may not to the lowest odd one. A path only ever goes up,
so that none comes back to a level it left, and running level by level respects every need.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import networkx as nx
from torch.fx import Node

from ...spec.region import RegionFile
from .facts import Facts, op_name

BEHIND = "it is a view of a value that is computed outside"


@dataclass
class Part:
    """One level: the nodes of a region, or those between two regions with the reason of each."""

    nodes: list[Node] = field(default_factory=list)
    reasons: dict[Node, str] = field(default_factory=dict)

    @property
    def inside(self) -> bool:
        return not self.reasons


def partition(facts: Facts, rule: RegionFile) -> list[Part]:
    """The parts of a graph in the order in which they run; all nodes of a part keep the graph's order."""
    reasons = {n: why for n in facts.nodes if (why := _why(facts, rule, n))}
    level = _levels(facts, reasons)
    parts: dict[int, Part] = {}
    for node in facts.nodes:
        part = parts.setdefault(level[node], Part())
        part.nodes.append(node)
        if level[node] % 2:
            part.reasons[node] = reasons.get(node, BEHIND)
    found = [parts[one] for one in sorted(parts)]
    for part in found:
        kernels = sum(n not in facts.free for n in part.nodes)
        if part.inside and kernels < rule.min_kernels:
            why = f"a region of {kernels} kernels here would be smaller than `min_kernels` ({rule.min_kernels})"
            part.reasons = dict.fromkeys(part.nodes, why)
    return found


def dependencies(facts: Facts) -> nx.DiGraph:
    """The needs of a graph as edges from what must run before."""
    made = nx.DiGraph()
    made.add_nodes_from(facts.nodes)
    made.add_edges_from((before, node) for node, needs in facts.needs.items() for before in needs)
    return made


def _why(facts: Facts, rule: RegionFile, node: Node) -> str:
    """Why a node may not be captured. What the rule says of an op comes first: it explains."""
    if node in facts.free:
        return ""
    name = op_name(node)
    return rule.why_split(name) or facts.why_outside(node) or rule.why_outside(name)


def _levels(facts: Facts, reasons: dict[Node, str]) -> dict[Node, int]:
    level: dict[Node, int] = {}
    for node in nx.topological_sort(dependencies(facts)):
        below = max((level[before] for before in facts.needs[node]), default=None)
        if node in facts.free:
            level[node] = 0 if below is None else below
        elif node in reasons:
            level[node] = -1 if below is None else below + (below + 1) % 2
        else:
            level[node] = 0 if below is None else below + below % 2
    return level
