"""The hook `hbm`: binding, page balancing, pools, L2, and how well kernels read."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sitsopt.runtime.hooks import Plan, Wanted, plan_hooks
from sitsopt.runtime.hooks.access import Access, advice_on, move_pages, pages_of
from sitsopt.runtime.hooks.settings import CannotSet
from sitsopt.spec.target import load_target
from tests.hooks.fakes import cards, host

TWO_NODES: dict[str, Any] = {"nodes": {0: "0-3", 1: "4-7"}, "memory": "0-1"}


def plan(root: Path, count: int = 1, wanted: Wanted | None = None, **more: Any) -> Plan:
    gpus = more.pop("cards", None) or cards(count)
    return plan_hooks({"hbm": {}}, wanted or Wanted(), host(root, gpus, **more)).plans["hbm"]


def actions(made: Plan) -> dict[str, Any]:
    return {action.key: action.value for action in made.actions}


def why(made: Plan, what: str) -> str:
    return next(refused.why for refused in made.refused if refused.what.startswith(what))


def test_next_to_the_gpu(tmp_path: Path) -> None:
    made = actions(plan(tmp_path, **TWO_NODES, gpu_nodes={0: 1}))
    assert made["affinity"] == [4, 5, 6, 7] and made["memory-node"] == 1


def test_only_cpus_that_are_allowed(tmp_path: Path) -> None:
    made = actions(plan(tmp_path, **TWO_NODES, gpu_nodes={0: 1}, allowed="2-5"))
    assert made["affinity"] == [4, 5]


@pytest.mark.parametrize(
    ("given", "what", "reason"),
    [
        (
            {"gpu_nodes": {0: 1}, "allowed": "0-3"},
            "CPU binding",
            "none of node 1's CPUs (4-7) is allowed",
        ),
        ({"gpu_nodes": {0: 1}, "allowed": "4-6"}, "CPU binding", "runs on node 1 alone already"),
        (
            {"gpu_nodes": {0: 1}, "memory": "0"},
            "memory binding",
            "node 1 is not among the memory nodes allowed ([0])",
        ),
        ({"gpu_nodes": {0: -1}}, "binding to a GPU's node", "the node of no visible GPU is known"),
        ({"gpu_nodes": {0: 0, 1: 1}}, "binding to a GPU's node", "2 GPUs on the nodes [0, 1]"),
    ],
)
def test_no_binding(given: dict[str, Any], what: str, reason: str, tmp_path: Path) -> None:
    made = plan(tmp_path, 2, **{**TWO_NODES, **given})
    assert reason in why(made, what)
    assert "affinity" not in actions(made) or what != "CPU binding"


def test_sparse_nodes(tmp_path: Path) -> None:
    made = plan(tmp_path, nodes={0: "0-3", 8: "4-7"}, memory="0,8", gpu_nodes={0: 8})
    assert actions(made)["affinity"] == [4, 5, 6, 7] and actions(made)["memory-node"] == 8


BALANCING = "/proc/sys/kernel/numa_balancing"
PERIOD = "/sys/kernel/debug/sched/numa_balancing/scan_period_min_ms"
OLD_PERIOD = "/proc/sys/kernel/numa_balancing_scan_period_min_ms"


@pytest.mark.parametrize("period", [PERIOD, OLD_PERIOD])
def test_balancing_is_proposed_and_done_only_with_leave(period: str, tmp_path: Path) -> None:
    machine = host(tmp_path, cards(1), **TWO_NODES, files={BALANCING: "1", period: "1000"})
    dry = plan_hooks({"hbm": {}}, host=machine)
    system = {a.key: a.value for a in dry.plans["hbm"].actions if a.scope == "system"}
    assert system == {f"file:{BALANCING}": 0, f"file:{period}": 60_000}
    with dry.apply():
        assert machine.read(BALANCING) == "1" and machine.read(period) == "1000"
    assert any("sitsopt doctor --apply" in refused.why for _, refused in dry.refused())
    with plan_hooks({"hbm": {}}, host=machine, scopes=("system",)).apply():
        assert machine.read(BALANCING) == "0" and machine.read(period) == "60000"
    assert machine.read(BALANCING) == "1" and machine.read(period) == "1000"


def test_no_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = host(tmp_path, cards(1), **TWO_NODES, files={BALANCING: "1"})

    def denied(self: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", denied)
    with plan_hooks({"hbm": {}}, host=machine, scopes=("system",)).apply() as run:
        pass
    assert ("hbm", "[Errno 13] Permission denied") in [(n, r.why) for n, r in run.refused()]


@pytest.mark.parametrize(
    ("files", "reason"), [({BALANCING: "0"}, "off already"), ({}, "off already")]
)
def test_nothing_to_balance(files: dict[str, str], reason: str, tmp_path: Path) -> None:
    assert reason in why(plan(tmp_path, **TWO_NODES, files=files), "page balancing")
    assert "one memory node" in why(
        plan(tmp_path / "one", files={BALANCING: "1"}), "page balancing"
    )


def test_pools(tmp_path: Path) -> None:
    assert "expandable_segments:True" in actions(plan(tmp_path))["env:PYTORCH_CUDA_ALLOC_CONF"]
    kept = plan(tmp_path, env={"PYTORCH_ALLOC_CONF": "backend:native"})
    assert why(kept, "allocator pools") == "PYTORCH_ALLOC_CONF is backend:native"


def test_l2(tmp_path: Path) -> None:
    h100 = Wanted(target=load_target("h100"))
    assert actions(plan(tmp_path, wanted=h100))["l2-persist"] == 51200 * 1024 * 3 // 4
    what = "an L2 window"
    assert "unknown" in why(plan(tmp_path, wanted=Wanted(target=load_target("cuda"))), what)
    assert "8.0" in why(plan(tmp_path, wanted=h100, cards=cards(1, capability=(7, 0))), what)
    assert "MIG" in why(plan(tmp_path, wanted=h100, cards=cards(1, mig=True)), what)
    assert "unknown" in why(plan(tmp_path, wanted=h100, cards=cards(1, mig=None)), what)


def brute_sectors(access: Access) -> float:
    touched = {
        (t * access.strides[-1] * access.item + b) // 32
        for t in range(32)
        for b in range(access.item)
    }
    return len(touched) / len({b // 32 for b in range(32 * access.item)})


@pytest.mark.parametrize("stride", [1, 2, 3, 8, 16, 4096])
@pytest.mark.parametrize("item", [1, 2, 4])
def test_sectors_by_counting(stride: int, item: int) -> None:
    access = Access("k", (64, 64), (1, stride), item)
    assert access.sectors() == pytest.approx(brute_sectors(access))


def test_channels_by_counting() -> None:
    for stride in (256, 512, 768, 1024, 2048, 4096, 8192, 10240, 20480):
        access = Access("k", (4096, stride), (stride, 1), 1)
        starts = {(row * stride // 256) % 80 for row in range(4096)}
        assert access.channels_used(80) == len(starts), stride


def test_advice_in_words() -> None:
    assert advice_on(Access("a", (64, 64), (64, 1), 2), None) == []
    assert (
        "neighbouring threads read 8192 bytes apart, 16 times"
        in advice_on(Access("t", (64, 4096), (1, 4096), 2), None)[0]
    )
    camped = advice_on(Access("c", (4096, 10240), (10240, 1), 2), 80)
    assert "start on 1 of 80 channels" in camped[0]
    assert advice_on(Access("c", (4096, 10240 + 128), (10240 + 128, 1), 2), 80) == []


def test_a_models_weights_are_looked_at(tmp_path: Path) -> None:
    weights = {"good": torch.zeros(8, 8), "turned": torch.zeros(64, 4096).t()}
    made = plan(tmp_path, wanted=Wanted(weights=weights))
    assert made.data["patterns"]["looked_at"] == 2
    assert [text.split(":")[0] for text in made.data["patterns"]["found"]] == ["turned"]


def test_pages_of_a_staging_buffer() -> None:
    buffer = torch.ones(64 * 1024)
    assert len(pages_of(buffer)) in (64, 65)
    try:
        where = move_pages(buffer, None)
        moved = move_pages(buffer, where[0])
    except (OSError, CannotSet) as error:
        pytest.skip(f"the kernel does not tell pages' nodes here: {error}")
    assert len(where) == len(pages_of(buffer)) and where[0] >= 0
    assert set(moved[1:-1]) == {where[0]}


def test_memory_policy_of_this_process(tmp_path: Path) -> None:
    """The real calls, where this kernel allows them: preferred, and the system's policy again."""
    from sitsopt.runtime.hooks.settings import setting

    one = setting("memory-node", host(tmp_path, None))
    try:
        before = one.read()
        one.write(0)
    except (OSError, CannotSet) as error:
        pytest.skip(f"this kernel has no memory policies for us: {error}")
    try:
        assert one.read() == 0
    finally:
        one.write(before)
    assert one.read() == before


def test_the_l2_window_through_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sitsopt.runtime.hooks.settings as settings

    held = [0]

    def get(pointer: Any, what: int) -> int:
        assert what == 6
        pointer._obj.value = held[0]
        return 0

    def put(what: int, size: Any) -> int:
        held[0] = size.value
        return 0

    monkeypatch.setattr(
        settings,
        "_runtime",
        lambda: SimpleNamespace(cudaDeviceGetLimit=get, cudaDeviceSetLimit=put),
    )
    machine = host(tmp_path, cards(1), env=dict(os.environ))
    with plan_hooks({"hbm": {}}, Wanted(target=load_target("h100")), machine).apply() as run:
        assert held[0] == 51200 * 1024 * 3 // 4
        assert "l2-persist" in {entry.key for entry in run.ledger.applied}
    assert held[0] == 0
