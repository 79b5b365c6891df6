"""What there is to tell about one model: its record, and the rules that could have been in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ..rewrite.record import Record
from ..runtime.kv.account import Account
from . import misses, sites


@dataclass
class Story:
    """One record, read in several ways. `rules` are those in force, by id, with their summaries; `excluded` those
    that the recipe leaves out, with its reason; `recorded` says whether near misses were kept; `makes` has the
    rules in force whose replacement holds an op, by op."""

    record: Record
    rules: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    recorded: bool = True
    bandwidth_gbs: float | None = None
    makes: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cache: Account | None = None  # what the model's last quantized cache held

    @cached_property
    def spots(self) -> dict[str, list[sites.Spot]]:
        """Distinct sites of the model by rule."""
        return sites.spots(self.record.graphs)

    @cached_property
    def attempts(self) -> list[misses.Attempt]:
        """Every miss once."""
        return misses.attempts(self.record.graphs)

    @cached_property
    def shown(self) -> list[misses.Group]:
        """The misses worth a reader's time, the closest first."""
        return [g for g in misses.groups(self.attempts) if g.near]

    def fired(self, rule: str) -> int:
        return len(self.spots.get(rule, ()))

    @property
    def ids(self) -> list[str]:
        """Every rule that something is known about: first those that fired, in the order they ran."""
        missed = (a.miss.rule for a in self.attempts)
        return list(dict.fromkeys([*self.spots, *self.rules, *missed, *self.excluded]))
