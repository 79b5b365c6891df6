"""Writes to inputs: through the input, a view or `out=`, in any order with the reads (M05, M06 and their kind)."""

from __future__ import annotations

import pytest
import torch

from tests.cases.harness import LAYOUTS, check, expand_dim0, rewrite_case
from tests.cases.programs import MUTATIONS

WRITABLE = [
    layout for layout in LAYOUTS if layout is not expand_dim0
]  # eager itself refuses some of these


def inputs(name: str) -> list[torch.Tensor]:
    torch.manual_seed(7)
    return [torch.randn(shape) for shape in MUTATIONS[name][1]]


@pytest.mark.parametrize("name", MUTATIONS)
def test_writes_without_a_compiler(name: str) -> None:
    rewrite_case(MUTATIONS[name][0], inputs(name), grads=[False], layouts=WRITABLE)


@pytest.mark.parametrize("name", MUTATIONS)
def test_writes_through_inductor(name: str) -> None:
    check(MUTATIONS[name][0], inputs(name), lowering="inductor", calls=2)


def test_inputs_that_move_together_and_then_share() -> None:
    """The same graph for inputs at other places, and another one as soon as they share their storage."""
    from sitsopt.runtime.writes import Sharing

    own, other = torch.zeros(4), torch.zeros(4)
    for fixed in (True, False):
        sharing = Sharing([own, other], fixed)
        call = sharing.guard(lambda *args: "compiled", lambda *args: "otherwise")
        whole = torch.zeros(8)
        said = [call(own, other), call(own, other), call(other, own), call(whole[:4], whole[2:6]),
                call(whole[:4], other), call(own, own), call(own, other)]  # fmt: skip
        assert said == ["compiled"] * 3 + ["otherwise", "compiled", "otherwise", "compiled"]
