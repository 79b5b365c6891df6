"""The hook `cpu`: what is tried, and that only what is faster stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sitsopt.runtime.hooks import Action, Plan, Wanted, plan_hooks
from sitsopt.runtime.hooks.cpu import Cpu, Measured, compare, decode_like, denormal_share
from tests.hooks.fakes import host

NAME = "SITSOPT_TEST_SETTING"


def plan(
    root: Path, wanted: Wanted | None = None, workload: Callable[[], Any] | None = None, **more: Any
) -> Plan:
    hook = Cpu(workload) if workload else Cpu()
    return plan_hooks(
        {"cpu": {}}, wanted or Wanted(), host(root, None, **more), given={"cpu": hook}
    ).plans["cpu"]


def tried(made: Plan) -> set[str]:
    return {r.what for r in made.refused if r.why.startswith("not measured")}


def test_what_would_be_tried(tmp_path: Path) -> None:
    assert {"threads = 8"} < tried(plan(tmp_path)) | {"threads = 1"}
    smt = tried(plan(tmp_path / "smt", siblings=2, allowed="0-7"))
    assert {"threads = 4", "affinity = [0, 2, 4, 6]"} <= smt
    quota = {"/sys/fs/cgroup/cpu.max": "300000 100000"}
    assert "threads = 3" in tried(plan(tmp_path / "quota", files=quota))
    old = {
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert "threads = 3" in tried(plan(tmp_path / "old", files=old))


def test_who_names_threads_has_them(tmp_path: Path) -> None:
    made = plan(tmp_path, env={"OMP_NUM_THREADS": "2"})
    assert not {t for t in tried(made) if t.startswith("threads")}
    assert any("OMP_NUM_THREADS says 2" in r.why for r in made.refused)


@pytest.mark.parametrize(
    ("mode", "proposed"),
    [
        ("always [madvise] never", True),
        ("[always] madvise never", False),
        ("always madvise [never]", False),
    ],
)
def test_huge_pages(mode: str, proposed: bool, tmp_path: Path) -> None:
    made = plan(tmp_path, files={"/sys/kernel/mm/transparent_hugepage/enabled": mode})
    assert ("env:THP_MEM_ALLOC_ENABLE" in {a.key for a in made.actions}) is proposed
    assert all(a.scope == "start" for a in made.actions)


def test_denormals_are_flushed_only_where_there_are_any(tmp_path: Path) -> None:
    normal, tiny = torch.ones(64, 64), torch.full((64, 64), 1e-41)
    assert denormal_share({"a": normal}) == 0.0 and denormal_share({"a": normal, "b": tiny}) == 0.5
    assert denormal_share({}) is None
    assert "denormals = True" in tried(plan(tmp_path, Wanted(weights={"b": tiny})))
    assert any(
        r.why == "the weights looked at hold none"
        for r in plan(tmp_path, Wanted(weights={"a": normal})).refused
    )


def test_only_what_is_faster_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that makes a workload twice as fast, one that makes it slower, one that does nothing."""
    monkeypatch.delenv(NAME, raising=False)

    def workload() -> None:
        time.sleep({"good": 0.002, "bad": 0.008}.get(os.environ.get(NAME, ""), 0.004))

    good, bad, same = compare(
        [Action(f"env:{NAME}", v, "") for v in ("good", "bad", "same")], workload, 0.1
    )
    assert good.pays and not bad.pays
    assert same.candidate == f"env:{NAME} = same" and same.turns >= 3
    assert NAME not in os.environ


def test_when_it_pays() -> None:
    assert Measured("x", 0.9, 1.0, 3, 3).pays
    assert not Measured("x", 0.98, 1.0, 3, 3).pays, "within the noise"
    assert not Measured("x", 0.9, 1.0, 1, 3).pays, "not the faster one most times"


def test_measured_settings_are_as_before(tmp_path: Path) -> None:
    threads, cpus = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
    made = plan(tmp_path, Wanted(measure=True), lambda: None, allowed=f"0-{len(cpus)}")
    assert made.data["measured"]
    assert torch.get_num_threads() == threads and sorted(os.sched_getaffinity(0)) == cpus


def test_the_stand_in_for_decoding_reads_the_models_weights() -> None:
    seen = []
    weights = {
        "a": torch.ones(4, 8),
        "b": torch.ones(4),
        "c": torch.ones(2, 4, dtype=torch.bfloat16),
    }
    original = torch.nn.functional.linear
    torch.nn.functional.linear = lambda x, w: (
        seen.append((tuple(x.shape), tuple(w.shape))) or original(x, w)
    )
    try:
        decode_like(weights)()
    finally:
        torch.nn.functional.linear = original
    assert seen == [((1, 8), (4, 8)), ((1, 4), (2, 4))]
