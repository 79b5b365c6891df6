"""The ring of most bandwidth: the order of GPUs in which the narrowest connection is as wide as it can be."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx

EXACT = 10  # GPUs up to which the widest sum is found as well; above, the first ring without a narrower link


def width(graph: nx.Graph, a: int, b: int) -> float:
    """GB/s one way of a direct connection; where NVML does not say, its lanes, or one."""
    edge = graph.edges[a, b]
    return float(edge["gbs"] or edge["lanes"] or 1)


def best_ring(graph: nx.Graph) -> list[int] | None:
    """All nodes in the order of a ring over direct connections: the narrowest link as wide as possible, then the
    sum of the widths, then the smallest numbers first. None when no ring goes through all of them.

    Two GPUs make a ring of one connection, there and back.
    """
    nodes = sorted(graph.nodes)
    if len(nodes) < 2:
        return None
    if len(nodes) == 2:
        return nodes if graph.has_edge(*nodes) else None
    for least in sorted({width(graph, a, b) for a, b in graph.edges}, reverse=True):
        wide = nx.Graph(
            (a, b, d) for a, b, d in graph.edges(data=True) if width(graph, a, b) >= least
        )
        wide.add_nodes_from(nodes)
        found = _widest(wide, nodes) if len(nodes) <= EXACT else _first(wide, nodes)
        if found is not None:
            return found
    return None


def ring_width(graph: nx.Graph, ring: list[int]) -> float:
    """The narrowest connection of a ring."""
    return min(width(graph, a, b) for a, b in pairwise([*ring, ring[0]]))


def _widest(graph: nx.Graph, nodes: list[int]) -> list[int] | None:
    """Held and Karp's dynamic programme over subsets, for the largest sum."""
    start, rest = nodes[0], nodes[1:]
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
    for i, node in enumerate(rest):
        if graph.has_edge(start, node):
            best[1 << i, i] = (-width(graph, start, node), (start, node))
    for _ in range(len(rest) - 1):
        step: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (seen, last), (cost, path) in best.items():
            for i, node in enumerate(rest):
                if seen >> i & 1 or not graph.has_edge(rest[last], node):
                    continue
                key, longer = (
                    (seen | 1 << i, i),
                    (cost - width(graph, rest[last], node), (*path, node)),
                )
                if key not in step or longer < step[key]:
                    step[key] = longer
        best = step
    closed = [
        (cost - width(graph, path[-1], start), path)
        for cost, path in best.values()
        if graph.has_edge(path[-1], start)
    ]
    return list(min(closed)[1]) if closed else None


def _first(graph: nx.Graph, nodes: list[int]) -> list[int] | None:
    """The first ring in the order of numbers, by backtracking."""
    path, taken = [nodes[0]], {nodes[0]}

    def extend() -> bool:
        if len(path) == len(nodes):
            return bool(graph.has_edge(path[-1], path[0]))
        for node in sorted(graph[path[-1]]):
            if node not in taken:
                path.append(node)
                taken.add(node)
                if extend():
                    return True
                taken.discard(path.pop())
        return False

    return path if min(dict(graph.degree).values()) > 1 and extend() else None
