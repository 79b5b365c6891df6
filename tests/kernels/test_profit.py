"""Never slower: a kernel is measured at its site against what it replaces, and the faster of the two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import sitsopt
from sitsopt.explain.text import as_text
from sitsopt.rewrite.record import Site
from sitsopt.runtime import kernels, stopwatch
from sitsopt.runtime.lower import _loses
from tests.backend.support import Mlp

pytestmark = pytest.mark.skipif(
    not kernels.availability()[0], reason=f"no kernels here: {kernels.availability()[1]}"
)


class Race:
    """Stands in for the clock: calls everyone once and gives the laps it was told."""

    def __init__(self, ours: float, theirs: float, steady: bool = True) -> None:
        self.laps = [stopwatch.Lap(ours, steady), stopwatch.Lap(theirs, steady)]
        self.sets: list[int] = []

    def __call__(self, contenders: Sequence[Sequence[Any]], device: str) -> list[stopwatch.Lap]:
        ours, theirs = ([call() for call in calls] for calls in contenders)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        self.sets.append(len(contenders[0]))
        return self.laps


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.availability()
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path))


def sites(monkeypatch: pytest.MonkeyPatch, race: Any, dynamic: bool = False, **options: Any) -> Any:
    """The linear sites of a small model, compiled without Inductor's part, and the report."""
    torch._dynamo.reset()
    monkeypatch.setattr(stopwatch, "race", race)
    monkeypatch.setattr("sitsopt.pipeline.compile_graph", lambda gm, values, lowering: gm.forward)
    model = Mlp()
    x = torch.randn(3, 16)
    run = torch.compile(model, backend="sits", options=options, dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    report = sitsopt.report(model)
    found = [s for g in report.record.graphs for s in g.sites]
    return [s for s in found if s.rule in ("fuse/gate_up", "fuse/linear")], report


def test_the_faster_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found, report = sites(monkeypatch, Race(10.0, 25.0))
    assert [s.lowered for s in found] == ["cpp", "cpp"]
    assert found[0].measured_us == {"sits": 10.0, "aten": 25.0}
    assert "(measured 10 us, aten 25 us)" in " ".join(as_text(report).split())


def test_a_slower_kernel_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found, report = sites(monkeypatch, Race(26.0, 25.0))
    assert [s.lowered for s in found] == ["inductor", "inductor"]
    assert found[0].lowered_why == "the kernel is slower here: measured 26 us, aten 25 us"
    (rule,) = [r for r in report.json()["rules"] if r["id"] == "fuse/linear"]
    assert rule["fired"] == 1 and rule["sites"][0]["measured_us"] == {"sits": 26.0, "aten": 25.0}


def test_a_verdict_is_kept_unless_the_machine_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Race(10.0, 25.0, steady=False)
    sites(monkeypatch, busy)
    calm = Race(30.0, 25.0)
    found, _ = sites(monkeypatch, calm)
    assert len(busy.sets) == len(calm.sets) == 2
    assert {s.lowered for s in found} == {"inductor"}
    again = Race(1.0, 25.0)
    found, _ = sites(monkeypatch, again)
    assert not again.sets and {s.lowered for s in found} == {"inductor"}


def test_always_and_model_do_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    for how in ("always", "model"):
        race = Race(26.0, 25.0)
        found, _ = sites(monkeypatch, race, set=f"profitability={how}")
        assert not race.sets and {s.lowered for s in found} == {"cpp"}
        assert not any(s.measured_us for s in found)


def test_the_model_decides_where_it_knows() -> None:
    site = Site("fuse/linear", None)  # type: ignore[arg-type]
    assert _loses(site) == ""
    site.predicted_us, site.unfused_us = 3.0, 2.0
    assert "predicts 3 us for it, 2 us without" in _loses(site)
    site.predicted_us = 1.0
    assert _loses(site) == ""


def test_a_symbolic_size_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race(26.0, 25.0)
    found, _ = sites(monkeypatch, race, dynamic=True)
    kept = [s for s in found if s.lowered == "cpp"]
    assert not race.sets and kept
    assert all("not measured: a size is symbolic" in s.lowered_why for s in kept)


def test_sites_of_one_shape_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.sin(self.a(x)))

    torch._dynamo.reset()
    race = Race(1.0, 2.0)
    monkeypatch.setattr(stopwatch, "race", race)
    monkeypatch.setattr("sitsopt.pipeline.compile_graph", lambda gm, values, lowering: gm.forward)
    with torch.no_grad():
        torch.compile(Two(), backend="sits")(torch.randn(2, 8))
    assert race.sets == [2]


def test_a_race_takes_turns_and_gives_the_shortest() -> None:
    order: list[str] = []

    def call(name: str) -> Any:
        return lambda: order.append(name)

    laps = stopwatch.race([[call("a"), call("b")], [call("c")]], "cpu")
    assert order[:6] == ["a", "c", "a", "c", "b", "c"]
    assert all(lap.us > 0 for lap in laps)


def test_calls_that_take_long_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(stopwatch, "LONG_S", 0.0)
    laps = stopwatch.race([[lambda: order.append("a")], [lambda: order.append("b")]], "cpu")
    assert order == ["a", "b"]
    assert all(lap.us > 0 and lap.steady for lap in laps)
