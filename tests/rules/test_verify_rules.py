"""Every shipped rule on its own examples, under mutation, and against the other rules of its stage."""

from __future__ import annotations

import pytest

from sitsopt.rewrite.mutate import survivors
from sitsopt.rewrite.overlap import overlaps
from sitsopt.rewrite.verify import verify
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.rule import load_rules

RULES = {rule.id: rule for rule in load_rules(rule_dirs(()))}
ELSEWHERE = ("fuse/", "fold/", "layout/")  # tested where their situations are
IDS = [rule for rule in RULES if not rule.startswith(ELSEWHERE)]


@pytest.mark.parametrize("rule", IDS)
def test_examples_hold(rule: str) -> None:
    assert verify(RULES[rule]) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", IDS)
def test_examples_notice_every_mutant(rule: str) -> None:
    assert survivors(RULES[rule]) == []


@pytest.mark.slow
def test_rules_that_want_the_same_nodes_are_in_order() -> None:
    assert [str(overlap) for overlap in overlaps(list(RULES.values()))] == []
