"""The judge finds each planted hazard, and names its file and line; it finds nothing in a step without any."""

from __future__ import annotations

import pytest
import torch

from sitsopt.runtime.capture import judge as j
from sitsopt.runtime.capture.judge import judge, place, span
from tests.regions.hazards import Planted, line_of

X = torch.randn(4, 8)
FOUND = {
    "item": (j.SYNC, "ITEM"), "truth": (j.SYNC, "TRUTH"), "cpu": (j.COPY, "CPU"), "numpy": (j.COPY, "NUMPY"),
    "tolist": (j.COPY, "TOLIST"), "nonzero": (j.SHAPE, "NONZERO"), "mask": (j.SHAPE, "MASK"),
    "wait": (j.WAIT, "WAIT"), "branch": (j.ORDER, "BRANCH"), "fresh": (j.ADDRESS, "FRESH"),
    "grows": (j.ALLOCATION, "GROWS"), "numbers": (j.COPY, "NUMBERS"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOUND)
def test_each_hazard_is_found_with_file_and_line(kind):
    model = Planted(kind)
    found = judge(lambda: model(X)).hazards
    wanted, mark = FOUND[kind]
    assert [(h.kind, h.source) for h in found] == [(wanted, line_of(mark))]
    assert line_of(mark) in str(found[0])


def test_a_plain_step_is_good():
    model = Planted()
    verdict = judge(lambda: model(X))
    assert verdict.good and verdict.spans[""] >= 3


def test_a_cache_that_stays_where_it_lies_is_good():
    cache, at = torch.zeros(10, 8), torch.tensor([3])
    assert judge(lambda: cache.index_copy_(0, at, X[:1])).good
    assert judge(lambda: torch.zeros(10, 8).index_copy_(0, at, X[:1])).good


def test_an_input_that_moves():
    inputs = iter([torch.ones(3), torch.ones(3).clone(), torch.ones(3)])
    kept = [next(inputs), next(inputs)]
    places = iter(kept)
    found = judge(lambda: next(places) + 1).hazards
    assert [h.kind for h in found] == [j.ADDRESS]


def test_only_spans_are_judged_where_there_are_any():
    def step():
        x = X.sum().item()
        with span("region0"):
            y = X + x
        with span("region1"):
            return y.nonzero()

    found = judge(step)
    assert [(h.kind, h.span) for h in found.hazards] == [(j.SHAPE, "region1")]
    assert found.spans == {"region0": 1, "region1": 1}


def test_the_place_that_is_told_wins():
    with place("model.py:7"):
        assert judge(lambda: X.sum().item()).hazards[0].source == "model.py:7"


def test_everything_is_as_it_was_behind_it():
    before = torch.cuda.synchronize, torch.cpu.synchronize
    judge(lambda: X + 1)
    assert before == (torch.cuda.synchronize, torch.cpu.synchronize)
