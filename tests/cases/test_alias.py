"""Results that share storage with inputs or with each other, and inputs that share storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases.harness import LAYOUTS, check, compiled, copies, expand_dim0, home, rewrite_case
from tests.cases.programs import RESULTS

WRITABLE = [layout for layout in LAYOUTS if layout is not expand_dim0]


def inputs(fn: Callable[..., Any]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(4, 6) for _ in range(fn.__code__.co_argcount)]


@pytest.mark.parametrize("name", RESULTS)
def test_results_without_a_compiler(name: str) -> None:
    rewrite_case(RESULTS[name], inputs(RESULTS[name]), layouts=WRITABLE, dtypes=[torch.float32])


@pytest.mark.parametrize("name", RESULTS)
def test_results_through_inductor(name: str) -> None:
    check(RESULTS[name], inputs(RESULTS[name]), lowering="inductor", calls=2)


def add_then_read(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(1)
    return y * 2, x.sum()


def read_write_read(x: torch.Tensor, y: torch.Tensor) -> Any:
    before = y.sin()
    x.mul_(3)
    y.add_(before)
    return before + y, x * 1


ALIASED: dict[str, Callable[[], list[torch.Tensor]]] = {
    "one tensor twice": lambda: [torch.randn(4, 6)] * 2,
    "the same view twice": lambda: [t := torch.randn(4, 6), t.view(4, 6)],
    "a row of the other": lambda: [t := torch.randn(4, 6), t[1:3]],
    "the other's transpose": lambda: [t := torch.randn(6, 6), t.t()],
    "overlapping halves": lambda: [(t := torch.randn(6, 6))[:4], t[2:]],
    "halves that do not overlap": lambda: [(t := torch.randn(6, 6))[:3], t[3:]],
    "columns between columns": lambda: [(t := torch.randn(4, 8))[:, ::2], t[:, 1::2]],
}


@pytest.mark.parametrize("fn", [add_then_read, read_write_read])
@pytest.mark.parametrize("name", ALIASED)
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_inputs_that_share_storage(name: str, fn: Callable[..., Any], lowering: str) -> None:
    torch.manual_seed(5)
    check(fn, ALIASED[name](), lowering=lowering)


def test_inputs_that_share_storage_only_at_the_second_call() -> None:
    code = compiled(read_write_read)
    for make in (lambda: [torch.randn(4, 6), torch.randn(4, 6)], *ALIASED.values()):
        mine = make()
        theirs = copies(mine)
        torch.testing.assert_close(code.call(*theirs), read_write_read(*mine))
        torch.testing.assert_close(theirs, mine)


def test_a_result_is_not_the_buffer_of_the_next_call() -> None:
    code = compiled(lambda x: (x * 2, x + 1), lowering="inductor")
    x = torch.randn(4, 6)
    first = code.call(x)
    kept = [t.clone() for t in first]
    second = code.call(torch.randn(4, 6))
    torch.testing.assert_close(list(first), kept)
    assert not {home(t) for t in first} & {home(t) for t in second}
