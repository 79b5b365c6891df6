"""The link graph: which GPUs reach each other over NVLink, how wide, and in how many hops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import networkx as nx

from .devices import Device
from .facts import Facts
from .nvml import PEER, SWITCH

HOPS = 2  # a copy through one GPU between two others is the longest way that is admitted
Pair = tuple[int, int]


@dataclass
class Links:
    """GPUs 0..n-1 in CUDA's order. An edge of `graph` is a direct connection: `lanes` (None: at least one, NVML
    does not say how many), `gbs` one way, `switched` when it leads through NVSwitch. `unknown` are pairs of
    which nothing can be said; `ports` is GB/s one way of a GPU into the switch."""

    devices: tuple[Device, ...]
    graph: nx.Graph
    unknown: set[Pair] = field(default_factory=set)
    ports: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def hops(self, a: int, b: int) -> int | None:
        """Links on the shortest way between two GPUs over NVLink alone; None when there is none."""
        try:
            return int(nx.shortest_path_length(self.graph, a, b))
        except nx.NetworkXNoPath:
            return None

    def reaches(self, a: int, b: int, hops: int = HOPS) -> bool | None:
        """Whether `a` reaches `b` over NVLink in at most `hops`; None where an unknown link could decide it."""
        found = self.hops(a, b)
        if found is not None and found <= hops:
            return True
        hopeful = self.graph.copy()
        hopeful.add_edges_from(self.unknown)
        if nx.has_path(hopeful, a, b) and nx.shortest_path_length(hopeful, a, b) <= hops:
            return None
        return False

    def mask(self, hops: int = HOPS) -> list[list[bool | None]]:
        """`reaches` for all pairs; a GPU reaches itself."""
        count = range(len(self.devices))
        return [[True if a == b else self.reaches(a, b, hops) for b in count] for a in count]

    def admits(self, group: Iterable[int], hops: int = HOPS) -> bool | None:
        """Whether an all-reduce over `group` stays on NVLink: every pair must be reached."""
        found = [self.reaches(a, b, hops) for a, b in combinations(sorted(group), 2)]
        return False if False in found else None if None in found else True

    def full(self, group: Iterable[int]) -> bool | None:
        """Whether every pair of `group` has a connection of its own."""
        return self.admits(group, 1)

    def groups(self) -> list[list[int]]:
        """GPUs that NVLink connects at all, each group sorted."""
        return sorted(sorted(part) for part in nx.connected_components(self.graph))

    def json(self) -> dict[str, Any]:
        edges = [
            {"between": [a, b], **self.graph.edges[a, b]}
            for a, b in sorted(map(_sorted, self.graph.edges))
        ]
        return {
            "devices": [d.label for d in self.devices],
            "edges": edges,
            "unknown": sorted(map(list, self.unknown)),
            "notes": self.notes,
        }


def _sorted(pair: Sequence[int]) -> Pair:
    return min(pair), max(pair)


def link_graph(facts: Facts, devices: tuple[Device, ...]) -> Links:
    """The graph of the devices that a process sees."""
    links = Links(devices, nx.Graph())
    links.graph.add_nodes_from(range(len(devices)))
    for place, device in enumerate(devices):
        port = [e for e in device.links or () if e["active"] and e["kind"] == SWITCH]
        if port and all(e["gbs"] for e in port):
            links.ports[place] = sum(e["gbs"] for e in port)
    for a, b in combinations(range(len(devices)), 2):
        _connect(links, facts, a, b)
    return links


def _connect(links: Links, facts: Facts, a: int, b: int) -> None:
    one, two = links.devices[a], links.devices[b]
    if one.index == two.index or one.mig or two.mig:
        links.notes.append(f"{a}-{b}: parts of a GPU reach no other over NVLink (MIG)")
        return
    low, high = sorted((one.index, two.index))
    allowed = facts[f"pair.{low}.{high}.nvlink"]
    if allowed is False:
        _explain_refusal(links, a, b)
        return
    ends = [_lanes(one, two), _lanes(two, one)]
    seen = [end for end in ends if end is not None]
    direct = [end for end in seen if end]
    if direct and len(direct) == len(seen):
        if len(seen) == 2 and len(seen[0]) != len(seen[1]):
            links.notes.append(
                f"{a}-{b}: {len(seen[0])} lanes at one end, {len(seen[1])} at the other"
            )
        _edge(links, a, b, min(seen, key=len), switched=False)
    elif _switch_lanes(one) and _switch_lanes(two):
        _edge(links, a, b, min(_switch_lanes(one), _switch_lanes(two), key=len), switched=True)
    elif allowed:
        links.graph.add_edge(a, b, lanes=None, gbs=None, switched=False)
    elif allowed is None and (not seen or any(_open(d) for d in (one, two)) or direct):
        links.unknown.add((a, b))


def _explain_refusal(links: Links, a: int, b: int) -> None:
    if _lanes(links.devices[a], links.devices[b]):
        links.notes.append(f"{a}-{b}: lanes are up, but the driver does not allow the two to meet")


def _lanes(one: Device, other: Device) -> list[dict[str, Any]] | None:
    """Active links of one GPU that end at the other; None when its links are unknown."""
    if one.links is None:
        return None
    return [
        e for e in one.links if e["active"] and e["peer"] == other.bus and e["kind"] in (PEER, None)
    ]


def _switch_lanes(device: Device) -> list[dict[str, Any]]:
    return [e for e in device.links or () if e["active"] and e["kind"] == SWITCH]


def _open(device: Device) -> bool:
    """Whether a link of it could lead anywhere: its state or its far end is not known."""
    return device.links is None or any(
        e["active"] is None or (e["active"] and e["peer"] is None) for e in device.links
    )


def _edge(links: Links, a: int, b: int, lanes: list[dict[str, Any]], switched: bool) -> None:
    speeds = [e["gbs"] for e in lanes]
    gbs = sum(speeds) if all(speeds) else None
    links.graph.add_edge(a, b, lanes=len(lanes), gbs=gbs, switched=switched)
