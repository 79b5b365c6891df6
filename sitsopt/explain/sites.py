"""Where rules fired, counted once over all graphs: decode and prefill of one layer are one site of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..rewrite.record import GraphRecord, Site


@dataclass
class Spot:
    """The `ordinal`-th place in a module where a rule fired, and what became of it in each graph."""

    rule: str
    module: str
    ordinal: int
    graphs: dict[str, Site] = field(default_factory=dict)

    @property
    def first(self) -> Site:
        """The site in the first graph that has it: of decode, where there is a decode graph."""
        return next(iter(self.graphs.values()))


def spots(graphs: Iterable[GraphRecord]) -> dict[str, list[Spot]]:
    """Distinct sites of the model by rule, in the order in which rules ran."""
    found: dict[tuple[str, str, int], Spot] = {}
    for graph in graphs:
        seen: Counter[tuple[str, str]] = Counter()
        for site in graph.sites:
            base = (site.rule, site.place.module)
            key = (*base, seen[base])
            seen[base] += 1
            found.setdefault(key, Spot(*key)).graphs[graph.name] = site
    by_rule: dict[str, list[Spot]] = {}
    for spot in found.values():
        by_rule.setdefault(spot.rule, []).append(spot)
    return by_rule


def step(graph: str) -> str:
    """The step that a graph belongs to: a graph break cuts `decode` into `decode`, `decode/1`, ..."""
    return graph.split("/")[0]


@dataclass
class Sums:
    """What a rule's sites come to in one step. None where a part is unknown."""

    bytes_saved: int | None = 0
    unfused_us: float | None = 0.0
    predicted_us: float | None = 0.0

    def add(self, site: Site) -> None:
        self.bytes_saved = _plus(self.bytes_saved, site.bytes_saved)
        self.unfused_us = _plus(self.unfused_us, site.unfused_us)
        self.predicted_us = _plus(self.predicted_us, site.predicted_us)


def sums(found: Iterable[Spot]) -> dict[str, Sums]:
    """The sums over some sites, by step."""
    total: dict[str, Sums] = {}
    for spot in found:
        for graph, site in spot.graphs.items():
            total.setdefault(step(graph), Sums()).add(site)
    return total


def _plus(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b
