"""Where rules almost fired: hopeless attempts set apart, like ones grouped, the closest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..rewrite.record import GraphRecord, Miss
from .names import alike, short, tidy

CLOSE = 0.5  # an attempt is worth showing when more than this share of its pattern fits
TIDY = "clean/"  # rules that tidy up: a miss costs nothing
MOST_FOUND = 3  # different values told for one group
IN_PATTERN = ("pattern", "shape", "dtype")  # reasons of a pattern that is not all there


@dataclass
class Attempt:
    """A miss at one place of the model, over all graphs that have it. `taken_by` is the rule that fired there
    with the same node: the pattern did not fit because another one, or another spelling, was right. `fires_in`
    are the graphs in which the rule itself fires in this module."""

    miss: Miss
    taken_by: str = ""
    fires_in: tuple[str, ...] = ()
    graphs: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """The whole pattern was there; a condition, or what surrounds it, said no."""
        return self.miss.reason not in IN_PATTERN

    @property
    def share(self) -> float:
        """How much of the pattern fits, from 0 to 1. The op that a pattern failed at does not count."""
        if self.refused:
            return 1.0
        fits = self.miss.matched - (self.miss.reason == "pattern")
        return min(1.0, fits / self.miss.of) if self.miss.of else 0.0

    @property
    def near(self) -> bool:
        """Worth showing: much of the pattern fits, nothing else became of the node, and something is lost."""
        return not self.taken_by and self.share > CLOSE and not self.miss.rule.startswith(TIDY)


@dataclass
class Group:
    """Attempts of one rule that failed alike: in thirty layers, at one line of the model's code."""

    attempts: list[Attempt]

    @property
    def first(self) -> Attempt:
        return self.attempts[0]

    @property
    def miss(self) -> Miss:
        return self.first.miss

    @property
    def near(self) -> bool:
        return self.first.near

    @property
    def modules(self) -> list[str]:
        return [a.miss.place.module for a in self.attempts]

    @property
    def graphs(self) -> list[str]:
        return list(dict.fromkeys(g for a in self.attempts for g in a.graphs))

    @property
    def fires_in(self) -> list[str]:
        return list(dict.fromkeys(g for a in self.attempts for g in a.fires_in))

    @property
    def taken_by(self) -> list[str]:
        return list(dict.fromkeys(a.taken_by for a in self.attempts if a.taken_by))

    @property
    def fit(self) -> str:
        """How much of the pattern is there, in words."""
        if self.first.refused:
            return "the whole pattern fits"
        return f"{self.miss.matched} of {self.miss.of} ops fit"

    @property
    def difference(self) -> str:
        """Expected and found; what the condition says already is not said again. "" when nothing is known."""
        found: dict[str, str] = {}
        for one in (a.miss for a in self.attempts):
            text = tidy(one.found).removeprefix(f"`{one.condition}` with ")
            found.setdefault(alike(text), text)
        shown = " or ".join(list(found.values())[:MOST_FOUND])
        shown += " or …" if len(found) > MOST_FOUND else ""
        if self.miss.expected in ("", self.miss.condition):
            return f"found {shown}" if shown else ""
        return f"expected {self.miss.expected}, found {shown or '?'}"


def attempts(graphs: list[GraphRecord]) -> list[Attempt]:
    """Every miss of the model once, though both its decode and its prefill graph have it."""
    fires = _fires(graphs)
    found: dict[tuple[object, ...], Attempt] = {}
    for graph in graphs:
        owners = {node: site.rule for site in graph.sites for node in site.took}
        seen: Counter[tuple[object, ...]] = Counter()
        for miss in graph.misses:
            module, owner = miss.place.module, owners.get(miss.place.node, "")
            base = (module, owner, *_place(miss), *map(alike, (miss.expected, miss.found)))
            elsewhere = tuple(fires.get((miss.rule, module), ()))
            one = found.setdefault((*base, seen[base]), Attempt(miss, owner, elsewhere))
            seen[base] += 1
            one.graphs.append(graph.name)
    return list(found.values())


def _fires(graphs: list[GraphRecord]) -> dict[tuple[str, str], dict[str, None]]:
    fires: dict[tuple[str, str], dict[str, None]] = {}
    for graph in graphs:
        for site in graph.sites:
            fires.setdefault((site.rule, site.place.module), {})[graph.name] = None
    return fires


def groups(found: Iterable[Attempt]) -> list[Group]:
    """Like attempts together; the group whose pattern fits furthest comes first."""
    by_kind: dict[tuple[object, ...], Group] = {}
    for attempt in found:
        key = (*_place(attempt.miss), attempt.near, bool(attempt.taken_by))
        by_kind.setdefault(key, Group([])).attempts.append(attempt)
    return sorted(by_kind.values(), key=_rank)


def _rank(group: Group) -> tuple[object, ...]:
    one = group.first
    lost = bool(one.taken_by) and one.refused
    return (
        *(not one.near, not lost, bool(group.fires_in), not one.refused),
        *(-one.share, -one.miss.matched, -len(group.attempts), one.miss.rule),
    )


def _place(miss: Miss) -> tuple[str, ...]:
    """What the misses of several layers have in common."""
    source = short(miss.place.source)
    return miss.rule, miss.reason, alike(miss.condition), source, miss.explanation
