"""The look before matching says no only where the matcher would, and spares it the rest."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from sitsopt.graph.capture import capture
from sitsopt.measure.compiletime import decode_graph, without_matches
from sitsopt.rewrite import engine
from sitsopt.rewrite.engine import Settings, rewrite
from sitsopt.rewrite.order import ordered
from sitsopt.rewrite.record import GraphRecord
from sitsopt.rewrite.view import GraphView
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.rule import Rule, load_rules


@lru_cache
def shipped() -> tuple[Rule, ...]:
    return tuple(ordered(load_rules(rule_dirs(()))))


@lru_cache
def graph(layers: int):
    return decode_graph(layers)


def rewritten(layers: int, rules, misses: bool = False) -> GraphRecord:
    gm, inputs = graph(layers)
    with torch.no_grad():
        captured = capture(gm, inputs)
        record = GraphRecord("graph")
        view = GraphView(captured.gm, captured.params, captured.written)
        rewrite(view, rules, Settings(misses=misses), record)
    return record


def test_nothing_is_lost_by_looking_first() -> None:
    """Near misses are recorded by matching everywhere, so that run is without the look."""
    fast, slow = rewritten(2, shipped()), rewritten(2, shipped(), misses=True)
    assert [(s.rule, s.key, s.took) for s in fast.sites] == [
        (s.rule, s.key, s.took) for s in slow.sites
    ]
    assert len(fast.sites) > 30 and len(slow.misses) > 30


@pytest.fixture
def attempts(monkeypatch) -> list[str]:
    """The rules for which the matcher was asked, an entry an attempt."""
    made: list[str] = []

    class Counted(engine.Attempt):
        def __init__(self, rule, *more):
            made.append(rule.id)
            super().__init__(rule, *more)

    monkeypatch.setattr(engine, "Attempt", Counted)
    return made


def test_attempts_grow_with_the_layers_and_not_faster(attempts) -> None:
    counts = []
    for layers in (2, 3, 4):
        attempts.clear()
        rewritten(layers, shipped())
        counts.append(len(attempts))
    assert counts[2] - counts[1] == counts[1] - counts[0] > 0


def test_rules_that_match_nowhere_are_not_attempted(attempts) -> None:
    record = rewritten(2, ordered([*shipped(), *without_matches(50)]))
    assert not [a for a in attempts if "nowhere" in a]
    assert len(record.sites) == len(rewritten(2, shipped()).sites)
