"""Every fake machine: its facts, its link graph, and plans that are the same text each time."""

from __future__ import annotations

import json
from pathlib import Path

import pynvml
import pytest

from sitsopt.runtime.hooks import Facts, Wanted, gather, names, plan_hooks
from sitsopt.runtime.hooks.devices import visible
from sitsopt.runtime.hooks.links import Links, link_graph
from sitsopt.runtime.hooks.ring import best_ring, ring_width
from sitsopt.spec.target import load_target
from tests.hooks.fakes import CALLS, Card, cards, host, same_json
from tests.hooks.topologies import CASES, Case


def links_of(root: Path, given: list[Card] | None, **more: object) -> tuple[Facts, Links]:
    facts = gather(host(root, given, **more))
    return facts, link_graph(facts, visible(facts).devices)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_found(case: Case, tmp_path: Path) -> None:
    facts, links = links_of(tmp_path, case.cards, **case.host)
    everyone = range(len(links.devices))
    assert [d.index for d in links.devices] == case.visible
    if case.admitted is not None or case.cards is None:
        assert links.admits(everyone) is (case.admitted if case.cards is not None else True)
    if case.full is not None:
        assert links.full(everyone) is case.full
    ring = best_ring(links.graph)
    if case.ring_gbs is None:
        assert ring is None or len(everyone) < 2 or links.unknown
    else:
        assert ring is not None and sorted(ring) == [*everyone]
        assert ring_width(links.graph, ring) == case.ring_gbs
    for name, value in case.facts.items():
        assert facts[name] == value, name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plans_are_plain_data_and_the_same_each_time(case: Case, tmp_path: Path) -> None:
    def planned(root: Path) -> dict[str, object]:
        wanted = Wanted(target=load_target("h100"), message_bytes=(8192, 4 << 20))
        run = plan_hooks(
            {name: {} for name in names()}, wanted, host(root, case.cards, **case.host)
        )
        assert not run.failed
        assert not run.ledger.applied
        return run.json()

    one, two = planned(tmp_path / "one"), planned(tmp_path / "two")
    assert same_json(one, two)
    assert json.loads(json.dumps(one)) == one
    for name in ("nvlink", "hbm", "cpu", "streams", "guard"):
        plan = one["plans"][name]
        assert plan["actions"] or plan["refused"], f"{name} says nothing"
        known = {n for n, fact in one["facts"].items() if fact["value"] is not None}
        for action in plan["actions"]:
            assert action["why"]
            assert set(action["because"]) <= known, "an action follows from facts that are known"


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 14
    assert {len(case.cards or ()) for case in CASES.values()} >= {0, 1, 2, 4, 8}


def test_lanes_that_are_up_do_not_make_a_mesh(tmp_path: Path) -> None:
    """R01: four cards with bridges 0-1 and 2-3; every card has active lanes."""
    _, links = links_of(tmp_path, cards(4, {(0, 1): 4, (2, 3): 4}))
    assert links.full([0, 1, 2, 3]) is False and links.admits([0, 1, 2, 3]) is False
    assert links.full([0, 1]) is True and links.full([2, 3]) is True
    assert links.full([0, 2]) is False and links.full([1, 3]) is False
    assert links.groups() == [[0, 1], [2, 3]]


def test_lanes_that_the_driver_denies(tmp_path: Path) -> None:
    _, links = links_of(tmp_path, cards(2, {(0, 1): 4}), denied=[(0, 1)])
    assert links.admits([0, 1]) is False
    assert links.notes == ["0-1: lanes are up, but the driver does not allow the two to meet"]


def test_the_narrower_end_counts(tmp_path: Path) -> None:
    _, links = links_of(tmp_path, CASES["asymmetric"].cards)
    assert links.graph.edges[0, 1]["lanes"] == 3
    assert "0-1: 4 lanes at one end, 3 at the other" in links.notes


def test_few_hops_are_nvlink_only(tmp_path: Path) -> None:
    _, links = links_of(tmp_path, CASES["circulant of eight"].cards)
    assert links.reaches(0, 2) is True and links.hops(0, 2) == 2
    assert links.reaches(0, 4) is False and links.reaches(0, 4, hops=4) is True
    _, apart = links_of(tmp_path, CASES["PCIe only"].cards)
    assert apart.reaches(0, 1, hops=99) is False


def test_a_speed_that_is_not_told_is_none(tmp_path: Path) -> None:
    unknown = {"nvmlDeviceGetNvLinkVersion": pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)}
    _, links = links_of(tmp_path, cards(2, {(0, 1): 4}), fail=unknown)
    assert links.graph.edges[0, 1] == {"lanes": 4, "gbs": None, "switched": False}
    run = plan_hooks({"nvlink": {}}, host=host(tmp_path, cards(2, {(0, 1): 4}), fail=unknown))
    assert run.plans["nvlink"].data["ring_gbs"] is None
    assert "speed of some links is unknown" in run.plans["nvlink"].refused[0].why


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


ERRORS = {
    name: pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))
    for name in (
        "NOT_SUPPORTED",
        "UNKNOWN",
        "LIBRARY_NOT_FOUND",
        "NO_PERMISSION",
        "GPU_IS_LOST",
        "UNINITIALIZED",
    )
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("call", CALLS)
def test_each_answer_fails_alone(call: str, error: Exception, tree: Path) -> None:
    """R08: whatever one call raises costs what only it can tell, and nothing becomes false."""
    tmp_path = tree
    given = cards(2, {(0, 1): 4})
    whole = gather(host(tmp_path, given)).json()
    part = gather(host(tmp_path, given, fail={call: error})).json()
    run = plan_hooks({name: {} for name in names()}, host=host(tmp_path, given, fail={call: error}))
    assert not run.failed and json.dumps(run.json())
    lost = {n for n in whole if n not in part or part[n]["value"] is None} - {
        n for n, fact in whole.items() if fact["value"] is None
    }
    if call in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"):
        assert all(n.startswith(("nvml", "gpu", "pair")) for n in lost)
    else:
        costs = {
            "nvmlSystemGetDriverVersion": {"nvml.driver"}, "nvmlDeviceGetUUID": {"uuid"},
            "nvmlDeviceGetName": {"name"}, "nvmlDeviceGetPciInfo": {"bus"}, "nvmlDeviceGetMemoryInfo": {"memory_mb"},
            "nvmlDeviceGetCudaComputeCapability": {"capability"}, "nvmlDeviceGetMigMode": {"mig"},
            "nvmlDeviceGetNvLinkState": {"links"}, "nvmlDeviceGetP2PStatus": {"nvlink"},
        }  # fmt: skip
        expected = costs.get(call, set())
        assert {n if n in expected else n.rpartition(".")[2] for n in lost} == expected
    changed = {
        n for n in part if n in whole and part[n]["value"] is not None and part[n] != whole[n]
    }
    assert all(part[n]["value"] is not False for n in changed)


def test_nothing_at_all(tmp_path: Path) -> None:
    """No /proc, no /sys, no NVML: every fact is unknown, every hook says so, nothing raises."""
    bare = host(tmp_path / "full", None)
    empty = type(bare)(tmp_path / "empty", {}, None)
    run = plan_hooks({name: {} for name in names()}, Wanted(measure=False), empty)
    assert not run.failed
    assert {fact["value"] for fact in run.facts.json().values()} == {None}
    assert not run.apply().ledger.applied
