"""Where rules almost fired: hopeless attempts set apart, like ones grouped, the closest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..rewrite.record import GraphRecord, Miss
from .names import alike, short

CLOSE = 0.5  # an attempt is worth showing when more than this share of its pattern matched


@dataclass
class Attempt:
    """A miss at one place of the model, over all graphs that have it. `taken_by` is the rule that fired there
    with the same node: the pattern did not fit because another one, or another spelling, was right."""

    miss: Miss
    taken_by: str
    graphs: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return share(self.miss)

    @property
    def near(self) -> bool:
        return not self.taken_by and self.share > CLOSE


@dataclass
class Group:
    """Attempts of one rule that failed alike: in thirty layers, at one line of the model's code."""

    miss: Miss
    attempts: list[Attempt]

    @property
    def near(self) -> bool:
        return any(a.near for a in self.attempts)

    @property
    def modules(self) -> list[str]:
        return [a.miss.place.module for a in self.attempts]

    @property
    def graphs(self) -> list[str]:
        return list(dict.fromkeys(g for a in self.attempts for g in a.graphs))

    @property
    def taken_by(self) -> list[str]:
        return list(dict.fromkeys(a.taken_by for a in self.attempts if a.taken_by))


def share(miss: Miss) -> float:
    """How much of the pattern had matched, from 0 to 1 (everything matched, a condition failed)."""
    return min(1.0, miss.matched / miss.of) if miss.of else 0.0


def attempts(graphs: Iterable[GraphRecord]) -> list[Attempt]:
    """Every miss of the model once, though both its decode and its prefill graph have it."""
    found: dict[tuple[object, ...], Attempt] = {}
    for graph in graphs:
        owners = {node: site.rule for site in graph.sites for node in site.took}
        seen: Counter[tuple[object, ...]] = Counter()
        for miss in graph.misses:
            owner = owners.get(miss.place.node, "")
            base = (miss.place.module, owner, *_alike(miss))
            one = found.setdefault((*base, seen[base]), Attempt(miss, owner))
            seen[base] += 1
            one.graphs.append(graph.name)
    return list(found.values())


def groups(found: Iterable[Attempt]) -> list[Group]:
    """Like attempts together; the group whose pattern matched furthest comes first."""
    by_kind: dict[tuple[object, ...], Group] = {}
    for attempt in found:
        key = (_alike(attempt.miss), attempt.near)
        by_kind.setdefault(key, Group(attempt.miss, [])).attempts.append(attempt)
    return sorted(by_kind.values(), key=_rank)


def shown(found: Iterable[Attempt], fired: Iterable[str]) -> list[Group]:
    """The groups worth a reader's time: near misses, and for a rule that fired nowhere its closest attempt."""
    everything, silent = groups(found), set(fired)
    chosen = []
    for group in everything:
        if group.near or (group.miss.rule not in silent and not group.taken_by):
            chosen.append(group)
            silent.add(group.miss.rule)
    return chosen


def _rank(group: Group) -> tuple[object, ...]:
    lost = bool(group.taken_by) and share(group.miss) == 1.0
    return (not group.near, not lost, -share(group.miss), -len(group.attempts), group.miss.rule)


def _alike(miss: Miss) -> tuple[object, ...]:
    texts = (miss.condition, miss.expected, miss.found)
    return (miss.rule, miss.reason, short(miss.place.source), miss.explanation, *map(alike, texts))
