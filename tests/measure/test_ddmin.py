from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsopt.measure.bisect import by_rule
from sitsopt.measure.ddmin import ddmin, ddmin_grouped


class Broken:
    """Breaks when any of the culprit sets is wholly enabled; counts how often it was asked."""

    def __init__(self, *culprits: set[int]) -> None:
        self.culprits, self.asked = culprits, []

    def __call__(self, enabled) -> bool:
        self.asked.append(tuple(enabled))
        return any(culprit <= set(enabled) for culprit in self.culprits)


@pytest.mark.parametrize("culprit", range(0, 200, 23))
def test_one_culprit_among_many_takes_few_trials(culprit: int):
    broken = Broken({culprit})
    assert ddmin(range(200), broken) == [culprit]
    assert len(broken.asked) <= 20


def test_nothing_enabled_breaks_too():
    assert ddmin([1, 2, 3], lambda enabled: True) == []


def test_a_pair_that_only_breaks_together():
    for pair in combinations(range(9), 2):
        assert ddmin(range(9), Broken(set(pair))) == list(pair)


def test_items_keep_their_order():
    assert ddmin("edcba", lambda enabled: {"a", "d"} <= set(enabled)) == ["d", "a"]


def test_no_set_is_tried_twice():
    broken = Broken({3, 11, 12})
    ddmin(range(16), broken)
    assert len(set(broken.asked)) == len(broken.asked)


@given(
    st.integers(1, 24), st.lists(st.sets(st.integers(0, 23), min_size=1), min_size=1, max_size=3)
)
def test_the_answer_breaks_and_every_item_of_it_is_needed(count, culprits):
    culprits = [{c % count for c in one} for one in culprits]
    broken = Broken(*culprits)
    found = ddmin(range(count), broken)
    assert broken(found)
    assert all(not broken([x for x in found if x != left]) for left in found)


def test_groups_first_then_their_members():
    groups = {"fuse/a": [0, 1, 2], "fuse/b": [3, 4], "fuse/c": list(range(5, 60))}
    assert ddmin_grouped(groups, Broken({4})) == [4]
    assert ddmin_grouped(groups, Broken({1, 33})) == [1, 33]
    assert ddmin_grouped({}, lambda enabled: True) == []


def test_sites_by_rule():
    sites = {"k1": {"id": "fuse/a"}, "k2": {"id": "fuse/b"}, "k3": {"id": "fuse/a"}}
    assert by_rule(sites) == {"fuse/a": ["k1", "k3"], "fuse/b": ["k2"]}
