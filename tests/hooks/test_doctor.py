"""`sitsopt doctor`: one screen, JSON, commands under the plan."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import sitsopt.measure.doctor as module
from sitsopt.cli._status import status
from sitsopt.cli.app import app
from sitsopt.measure.loadtime import LoadTime
from sitsopt.runtime.hooks import Host
from tests.hooks.fakes import cards, host

HOOKS = ["nvlink", "hbm", "cpu", "streams", "guard"]


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The command line on a machine of eight GPUs on two nodes."""
    machine = host(
        tmp_path, cards(8, switch=18), nodes={0: "0-3", 1: "4-7"}, memory="0-1",
        gpu_nodes={i: i // 4 for i in range(8)}, files={"/proc/sys/kernel/numa_balancing": "1"},
    )  # fmt: skip
    monkeypatch.setattr(Host, "here", staticmethod(lambda: machine))
    return machine


def test_here(capsys: pytest.CaptureFixture[str]) -> None:
    """A machine without a GPU: facts, plan and what was refused on one screen."""
    assert status(app, ["doctor", "--quick"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "target ",
        "Facts",
        "Plan (a dry run",
        "Refused, and why",
        "Kernels and start-up",
        "allowed",
    ):
        assert part in shown
    assert len(shown.splitlines()) <= 50
    assert max(map(len, shown.splitlines())) <= 110


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(app, ["doctor", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {
        "target",
        "machine",
        "facts",
        "plans",
        "applied",
        "refused",
        "kernel_cache",
        "load_time",
    } <= set(found)
    assert list(found["plans"])[:5] == HOOKS and found["applied"] == []
    assert all(set(fact) == {"value", "source", "problem"} for fact in found["facts"].values())
    assert all(refused["why"] for refused in found["refused"])


def test_eight_gpus_on_one_screen(eight: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(app, ["doctor", "--quick", "--target", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "ring 0 1 2 3 4 5 6 7, 450 GB/s one way; full mesh: True" in " ".join(shown.split())
    assert "[system]" in shown and "numa_balancing = 0" in shown
    assert len(shown.splitlines()) <= 70
    assert eight.read("/proc/sys/kernel/numa_balancing") == "1"


def test_a_command_under_the_plan(
    eight: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, before = tmp_path / "out.json", dict(os.environ)
    script = f"import json, os; json.dump(dict(os.environ), open({str(out)!r}, 'w')); raise SystemExit(5)"
    assert (
        status(app, ["doctor", "--quick", "--json", "--apply", "--", sys.executable, "-c", script])
        == 5
    )
    found, seen = json.loads(capsys.readouterr().out), json.loads(out.read_text())
    assert seen["NCCL_P2P_LEVEL"] == "NVL" and seen["THP_MEM_ALLOC_ENABLE"] == "1"
    assert {a["key"] for a in found["applied"]} >= {
        "file:/proc/sys/kernel/numa_balancing",
        "env:NCCL_P2P_LEVEL",
    }
    assert found["not_reverted"] == []
    assert dict(os.environ) == before and eight.read("/proc/sys/kernel/numa_balancing") == "1"


def test_bad_input(eight: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(app, ["doctor", "--quick", "--", "true"]) == 2
    assert "--apply" in capsys.readouterr().err
    before = dict(os.environ)
    assert status(app, ["doctor", "--quick", "--apply", "--", "/not/there"]) == 2
    assert "/not/there: No such file" in capsys.readouterr().err
    assert dict(os.environ) == before and eight.read("/proc/sys/kernel/numa_balancing") == "1"
    assert status(app, ["doctor", "--quick", "--recipe", "not-there"]) == 2


def test_the_recipe_decides_what_is_applied(
    eight: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(app, ["doctor", "--quick", "--json", "--apply", "--set", "hooks.nvlink={}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {a["hook"] for a in found["applied"]} == {"nvlink"}
    assert list(found["plans"])[:5] == HOOKS
    assert any(r["hook"] == "hbm" and "apply: false" in r["why"] for r in found["refused"])


def test_start_and_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = LoadTime(
        {"import torch": 1.5, "weights": 0.5},
        {"cached": 3, "built": 1},
        {"from_disk": 2, "all": 2},
        ["a note"],
    )
    monkeypatch.setattr("sitsopt.measure.doctor.load_time", lambda *given: load)
    monkeypatch.setattr("sitsopt.runtime.kernels.build.uses", lambda: (3, 4))
    monkeypatch.setattr(module, "_sections", lambda recipe: {})
    assert status(app, ["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 4 found on disk (75.0%)" in shown
    assert "2.00 s: import torch 1.50 s, weights 0.50 s" in shown
    assert "2 of 2 compiled calls came from disk" in shown and "a note" in shown


@pytest.mark.slow
@pytest.mark.sample
def test_a_start_is_told_stage_by_stage() -> None:
    from sitsopt.measure.loadtime import load_time

    found = load_time()
    assert {"interpreter", "import torch", "import sitsopt", "the rest"} <= set(found.stages)
    assert found.stages["import torch"] > found.stages["interpreter"]
    assert all(seconds >= 0 for seconds in found.stages.values())
