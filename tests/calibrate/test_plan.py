"""A budget of bits: never above it, spent where it saves most."""

import pytest

from sitsopt.calibrate.grid import Form
from sitsopt.calibrate.sensitivity import plan

INT4, INT8 = Form("int4", 64, True), Form("int8")
SIZES = {"a": (64, 640), "b": (64, 640), "c": (640, 640)}
FORMS = {name: [INT4, INT8] for name in SIZES}
COSTS = {
    "a": {INT4.label: 0.1, INT8.label: 0.001},
    "b": {INT4.label: 0.02, INT8.label: 0.001},
    "c": {INT4.label: 0.11, INT8.label: 0.001},
}


def bits(chosen):
    sizes = {n: r * k for n, (r, k) in SIZES.items()}
    spent = sum(f.layout.bits(*SIZES[n]) * sizes[n] for n, f in chosen.items())
    return spent / sum(sizes.values())


@pytest.mark.parametrize("budget", [4.6, 4.9, 5.2, 7.0, 9.0])
def test_within_the_budget(budget):
    assert bits(plan(COSTS, SIZES, FORMS, budget)) <= budget


def test_what_saves_most_first():
    assert plan(COSTS, SIZES, FORMS, 4.56)["a"] == INT4
    chosen = plan(COSTS, SIZES, FORMS, 4.9)
    assert chosen == {"a": INT8, "b": INT4, "c": INT4}
    assert set(plan(COSTS, SIZES, FORMS, 16).values()) == {INT8}


def test_too_few_bits():
    with pytest.raises(ValueError, match=r"4 bits .* too few: the smallest forms take 4\.5"):
        plan(COSTS, SIZES, FORMS, 4)
