"""Descriptions: the same in every process, another one for what a trace may read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from sitsopt.dispatch.describe import Describer, Opaque, program

STABLE = """
import torch
from torch import nn
from sitsopt.dispatch.describe import Describer
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
model.extra = {"a": {3, 1, 2}, "b": (torch.float32, slice(1, 2)), "f": len}
print(Describer().digest(model))
"""


def digest(value: Any) -> str:
    return Describer().digest(value)


def test_two_processes_agree() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", STABLE], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.strip()) == 64


class Config:
    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


def plus(n: int) -> Any:
    return lambda x: x + n


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        ("1", 1),
        ((1, 2), [1, 2]),
        ([1, [2]], [[1], 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.zeros(2), torch.zeros(2, device="meta")),
        (torch.zeros(2), nn.Parameter(torch.zeros(2), requires_grad=False)),
        (nn.Linear(2, 2), nn.Linear(2, 2, bias=False)),
        (nn.ReLU(), nn.SiLU()),
        (nn.ReLU(), nn.ReLU().eval()),
        (Config(a=1), Config(a=2)),
        (Config(a=Config(b=[1])), Config(a=Config(b=[2]))),
        (plus(1), plus(2)),
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x.sin(), lambda x: x.cos()),
        (torch.float32, torch.float64),
        (torch.device("cpu"), torch.device("meta")),
    ],
)
def test_what_differs_has_another_digest(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest(one) == digest(one)


def test_contents_of_tensors_do_not_count_and_ties_do() -> None:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    assert digest([a, b]) == digest([nn.Linear(3, 3), nn.Linear(3, 3)])
    b.weight = a.weight
    assert digest([a, b]) != digest([nn.Linear(3, 3), nn.Linear(3, 3)])


def test_a_value_that_contains_itself_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert digest(loop) == digest(loop)


def test_what_cannot_be_described_is_refused() -> None:
    with pytest.raises(Opaque, match="generator"):
        digest(x for x in [1])


def test_programs_are_told_apart_by_their_code() -> None:
    assert program(lambda x: x + 1) != program(lambda x: x - 1)
    assert program(torch.add) != program(torch.sub)

    class A:
        def f(self) -> int:
            return 1

    before = program(A)
    A.f = lambda self: 2  # type: ignore[method-assign]
    assert program(A) != before
