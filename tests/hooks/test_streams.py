"""The capture window, and orders of kernels against every order that there is."""

from __future__ import annotations

import gc
import random
from itertools import permutations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sitsopt.runtime.hooks import plan_hooks
from sitsopt.runtime.hooks import streams as hook
from sitsopt.runtime.hooks.streams import NotReady, Work, capture_window, pending, schedule
from tests.hooks.fakes import cards, host


class Cuda(SimpleNamespace):
    """What is asked of torch.cuda."""

    def __init__(self, busy: int = 0, initialized: bool = True, capturing: bool = False) -> None:
        super().__init__(busy=busy, initialized=initialized, capturing=capturing)
        self.Stream = SimpleNamespace(priority_range=lambda: (0, -3))

    def is_initialized(self) -> bool:
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self) -> Any:
        return SimpleNamespace(query=lambda: self.busy == 0)

    def synchronize(self) -> None:
        self.busy = 0


def test_the_window() -> None:
    assert pending(Cuda()) == ""
    assert pending(Cuda(busy=1)) == "work is pending on 1 of 1 streams"
    assert "not initialised" in pending(Cuda(initialized=False))
    assert "going on already" in pending(Cuda(capturing=True))
    with capture_window(Cuda(busy=1)):
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(NotReady, match="pending"), capture_window(Cuda(busy=1), settle=False):
        pass
    side = [SimpleNamespace(query=lambda: False)]
    with pytest.raises(NotReady, match="1 of 2"), capture_window(Cuda(), side):
        pass
    assert gc.isenabled()


def test_a_capture_that_is_left_open() -> None:
    cuda = Cuda()
    with pytest.raises(NotReady, match="not ended"), capture_window(cuda):
        cuda.capturing = True
    assert gc.isenabled()


def test_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = plan_hooks({"streams": {}}, host=host(tmp_path, None)).plans["streams"]
    assert none.refused and not none.data
    monkeypatch.setattr(hook, "_cuda", lambda: Cuda())
    made = plan_hooks({"streams": {}}, host=host(tmp_path, cards(1))).plans["streams"]
    assert made.data == {"priorities": {"main": -3, "side": 0}, "window": "may open now"}


def length(work: list[Work], order: tuple[int, ...], places: tuple[int, ...]) -> float | None:
    """When everything is done, for one order and one choice of streams; None where the order breaks a need."""
    done: dict[str, float] = {}
    free = [0.0, 0.0]
    for i in order:
        if any(need not in done for need in work[i].needs):
            return None
        start = max([free[places[i]], *(done[need] for need in work[i].needs)])
        free[places[i]] = done[work[i].name] = start + work[i].us
    return max(done.values())


@pytest.mark.parametrize("seed", range(12))
def test_near_the_best_of_all_orders(seed: int) -> None:
    pick = random.Random(seed)
    work = [
        Work(
            f"k{i}",
            tuple(f"k{j}" for j in range(i) if pick.random() < 0.4),
            float(pick.randint(1, 9)),
        )
        for i in range(5)
    ]
    launches = schedule(work, 2)
    times = {launch.name: launch.start for launch in launches}
    ends = {one.name: times[one.name] + one.us for one in work}
    assert all(times[one.name] >= ends[need] for one in work for need in one.needs)
    for a, b in ((x, y) for x in launches for y in launches if x is not y and x.stream == y.stream):
        assert ends[a.name] <= b.start or ends[b.name] <= a.start
    found = [length(work, o, p) for o in permutations(range(5)) for p in product((0, 1), repeat=5)]
    best = min(each for each in found if each is not None)
    # Graham's bound for list scheduling on two machines.
    assert best <= max(ends.values()) <= 1.5 * best
    assert schedule(work, 2) == launches


def test_two_branches_run_side_by_side() -> None:
    work = [
        Work("in"),
        Work("gate", ("in",), 5),
        Work("up", ("in",), 5),
        Work("mul", ("gate", "up")),
    ]
    launches = {launch.name: launch for launch in schedule(work)}
    assert launches["gate"].stream != launches["up"].stream
    assert launches["mul"].start == 6.0 and len(launches["mul"].waits) == 1


def test_a_long_chain_needs_no_stack() -> None:
    chain = [Work("0"), *(Work(str(i), (str(i - 1),)) for i in range(1, 3000))]
    assert schedule(chain, 1)[-1].start == 2999.0


def test_what_cannot_be_ordered() -> None:
    with pytest.raises(ValueError, match="need each other"):
        schedule([Work("a", ("b",)), Work("b", ("a",))])
    with pytest.raises(ValueError, match="a needs z, which is not there"):
        schedule([Work("a", ("z",))])
