"""Hooks by name: order, third parties, recipes."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import sitsopt.runtime.hooks.run as module
from sitsopt.runtime.hooks import (
    Action,
    Facts,
    Hook,
    Plan,
    Settings,
    Wanted,
    names,
    ordered,
    plan_hooks,
)
from sitsopt.spec.errors import SpecError
from sitsopt.spec.recipe import load_recipe, requests
from tests.hooks.fakes import cards, host

NAME = "SITSOPT_TEST_SETTING"


class Acme(Settings):
    """Somebody else's hook."""

    name, after = "acme", ("guard",)
    given_back = 0

    def plan(self, facts: Facts, wanted: Wanted) -> Plan:
        made = Plan(self.name, data={"cpus": facts["cpu.allowed"]})
        made.actions.append(Action(f"env:{NAME}", "acme", "because", because=("cpu.allowed",)))
        return made

    def revert(self) -> None:
        Acme.given_back += 1

    def report(self) -> dict[str, Any]:
        return {"saw": os.environ.get(NAME)}


class Broken(Acme):
    name, after = "broken", ()

    def plan(self, facts: Facts, wanted: Wanted) -> Plan:
        raise KeyError("a bug of its own")


NOT_A_HOOK = dict


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name, f"{__name__}:{what}", module.GROUP)
        for name, what in (("acme", "Acme"), ("broken", "Broken"), ("odd", "NOT_A_HOOK"))
    ]
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.value.partition(":")[2]])
    monkeypatch.setattr(
        module, "entry_points", lambda group: points if group == module.GROUP else []
    )
    monkeypatch.delenv(NAME, raising=False)


def test_the_order() -> None:
    assert names() == ["nvlink", "hbm", "cpu", "streams", "guard", "acme", "broken", "odd"]
    found = ordered(
        [module.make(n) for n in ("broken", "acme", "guard", "streams", "cpu", "hbm", "nvlink")]
    )
    assert [hook.name for hook in found] == [
        "nvlink",
        "hbm",
        "cpu",
        "streams",
        "guard",
        "acme",
        "broken",
    ]
    assert all(isinstance(hook, Hook) for hook in found)


def test_a_third_partys_hook(tmp_path: Path) -> None:
    before = Acme.given_back
    with plan_hooks({"acme": {}}, host=host(tmp_path, None)).apply() as run:
        assert os.environ[NAME] == "acme"
        assert run.json()["reports"]["acme"] == {"saw": "acme"}
        assert run.plans["acme"].data == {"cpus": [*range(8)]}
    assert NAME not in os.environ and Acme.given_back == before + 1


def test_apply_false_only_plans(tmp_path: Path) -> None:
    with plan_hooks({"acme": {"apply": False}}, host=host(tmp_path, None)).apply() as run:
        assert NAME not in os.environ
        assert [(n, r.why) for n, r in run.refused()] == [("acme", "the recipe says apply: false")]


def test_what_is_not_there_or_broken_does_not_stop_the_others(tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {"absent": {}, "broken": {}, "odd": {}, "acme": {}}
    with plan_hooks(sections, host=host(tmp_path, None)).apply() as run:
        assert os.environ[NAME] == "acme"
        assert run.failed["absent"].startswith("no hook `absent` is installed: there are nvlink,")
        assert run.failed["broken"] == "KeyError: 'a bug of its own'"
        assert "is no hook called odd" in run.failed["odd"]
        assert {n for n, _ in run.refused()} == {"absent", "broken", "odd"}


def test_recipes_name_them() -> None:
    recipe = load_recipe(
        {"hooks": {"cpu": {}, "nvlink": {"apply": False}, "others": {"acme": {}}, "hbm": None}}
    )
    assert recipe.hooks.sections() == {
        "nvlink": {"apply": False},
        "cpu": {"apply": True},
        "acme": {"apply": True},
    }
    assert [r.asked for r in requests(recipe)] == [
        "hooks: acme, applied",
        "hooks: cpu, applied",
        "hooks: nvlink, planned",
    ]


@pytest.mark.parametrize(
    ("guard", "path"),
    [
        ({"steps": []}, "steps"),
        ({"steps": ["pool"]}, "steps"),
        ({"fragmentation": 2}, "fragmentation"),
        ({"failures": 0}, "failures"),
    ],
)
def test_guards_settings_are_checked(guard: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError, match=path):
        load_recipe({"hooks": {"guard": guard}})


def test_all_of_them_on_a_machine_of_eight(tmp_path: Path) -> None:
    """In turn on one machine: nvlink sets NCCL's variables, hbm the pools; nothing of the system."""
    before = dict(os.environ)
    machine = host(tmp_path, cards(8, switch=18), env={})
    with plan_hooks(
        {n: {} for n in names()[:5]}, Wanted(message_bytes=(8192,)), machine
    ).apply() as run:
        changed = {k: v for k, v in os.environ.items() if before.get(k) != v}
        assert changed == {
            "NCCL_ALGO": "Tree", "NCCL_PROTO": "LL", "NCCL_P2P_LEVEL": "NVL",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:8",
        }  # fmt: skip
        assert {entry.hook for entry in run.ledger.applied} == {"nvlink", "hbm"}
    assert dict(os.environ) == before
