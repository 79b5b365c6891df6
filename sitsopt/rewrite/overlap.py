"""Rules that want the same nodes: two of one stage that both fire on a graph must say which goes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..spec.rule import Example, Rule
from .engine import Settings, rewrite
from .example import build
from .record import GraphRecord


@dataclass(frozen=True)
class Overlap:
    """`first` and `second` take common nodes of the example at `place`, and neither is `after` or `overrides` the
    other. A `shadow` is a rule that never gets to fire on its own example because of the other."""

    first: str
    second: str
    place: str
    nodes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        return {
            "first": self.first,
            "second": self.second,
            "place": self.place,
            "nodes": list(self.nodes),
        }

    def __str__(self) -> str:
        return (
            f"{self.first} and {self.second} both take {', '.join(self.nodes)} in the example at {self.place};"
            f" say `after:` or `overrides:` in one of them"
        )


def overlaps(rules: Sequence[Rule]) -> list[Overlap]:
    """Every unordered pair of one stage that competes on an example of either."""
    ordered = _closure(rules)
    found: dict[frozenset[str], Overlap] = {}
    for rule in rules:
        rivals = [r for r in rules if r.stage == rule.stage and r.id != rule.id]
        rivals = [
            r for r in rivals if r.id not in ordered[rule.id] and rule.id not in ordered[r.id]
        ]
        for spelling, example in _cases(rule):
            taken = _took(rule, rule, spelling, example)
            for rival in rivals:
                pair = frozenset((rule.id, rival.id))
                if pair not in found and taken:
                    common = taken & _took(rule, rival, spelling, example)
                    if common:
                        names = tuple(sorted(common))
                        found[pair] = Overlap(rule.id, rival.id, str(example.pos), names)
    return list(found.values())


def _cases(rule: Rule) -> Iterator[tuple[int, Example]]:
    """One firing example for every spelling."""
    done: set[int] = set()
    for example in rule.examples:
        if example.fires and example.given is None:
            for spelling in example.spellings(rule):
                if spelling not in done:
                    done.add(spelling)
                    yield spelling, example


def _took(owner: Rule, subject: Rule, spelling: int, example: Example) -> set[str]:
    try:
        case = build(owner, spelling, example)
        applied = rewrite(case.view, [subject], Settings(), GraphRecord("overlap"))
    except Exception:
        return set()  # `verify` reports an example that cannot be built
    return {n.name for item in applied for n in item.match.nodes}


def _closure(rules: Sequence[Rule]) -> dict[str, set[str]]:
    """For each rule, those that are ordered before it, directly or through others."""
    before: dict[str, set[str]] = {r.id: set(r.after) for r in rules}
    for rule in rules:
        for other in rule.overrides:
            before.setdefault(other, set()).add(rule.id)
    for _ in rules:
        grown = {
            k: v.union(*(before.get(i, set()) for i in v)) if v else v for k, v in before.items()
        }
        if grown == before:
            break
        before = grown
    return before
