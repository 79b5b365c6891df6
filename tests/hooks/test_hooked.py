"""Hooks of an optimized model: applied with it, said under `effective`, taken back with it."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import sitsopt
from sitsopt import hooked
from sitsopt.pipeline import LoweringError
from sitsopt.runtime.hooks import Action, Facts, Plan, Settings, Wanted
from sitsopt.runtime.hooks import run as module
from sitsopt.runtime.hooks.stepdown import Guarded
from sitsopt.session import clear, sessions_of

NAME = "SITSOPT_TEST_SETTING"


class Sets(Settings):
    """A hook that sets a variable, and would change the machine."""

    name = "cpu"

    def plan(self, facts: Facts, wanted: Wanted) -> Plan:
        assert wanted.measure and wanted.target is not None and "0.weight" in wanted.weights
        actions = [
            Action(f"env:{NAME}", "1", ""),
            Action("file:/proc/sys/kernel/numa_balancing", 7, "", "system"),
        ]
        return Plan(self.name, actions)


@pytest.fixture(autouse=True)
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.OWN, "cpu", Sets)
    monkeypatch.delenv(NAME, raising=False)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()


def effective(owner: Any) -> dict[str, tuple[str, str]]:
    return {e.asked: (e.got, e.reason) for s in sessions_of(owner) for e in s.record.effective}


def test_applied_and_said() -> None:
    one = sitsopt.optimize(model(), {"hooks": {"cpu": {}, "guard": {}}}, lowering="eager")
    assert os.environ[NAME] == "1"
    got, reason = effective(one)["hooks: cpu"]
    assert got == f"env:{NAME} = 1" and "`sitsopt doctor --apply` does it" in reason
    assert effective(one)["hooks: guard"][0] == "watches every call"
    run = hooked.hooks_of(one)
    assert run is not None and [entry.hook for entry in run.ledger.applied] == ["cpu"]
    run.revert()


def test_optimized_anew_without_hooks() -> None:
    one = sitsopt.optimize(model(), {"hooks": {"cpu": {}}}, lowering="eager")
    assert os.environ[NAME] == "1"
    sitsopt.optimize(one, "default", lowering="eager")
    assert NAME not in os.environ and hooked.hooks_of(one) is None


def test_gone_with_the_model() -> None:
    one = sitsopt.optimize(model(), {"hooks": {"cpu": {}, "guard": {}}}, lowering="eager")
    assert os.environ[NAME] == "1"
    alive = weakref.ref(one)
    del one
    gc.collect()
    assert alive() is None and NAME not in os.environ


def test_apply_false() -> None:
    one = sitsopt.optimize(
        model(), {"hooks": {"cpu": {"apply": False}, "guard": {"apply": False}}}, lowering="eager"
    )
    assert NAME not in os.environ
    assert effective(one)["hooks: cpu"][0] == effective(one)["hooks: guard"][0] == "planned only"
    assert not isinstance(one._compiled_call_impl, Guarded)


def test_torch_compile_alone_runs_none() -> None:
    clear()
    one = model()
    compiled = torch.compile(
        one, backend="sits", options={"recipe": {"hooks": {"cpu": {}}}, "lowering": "eager"}
    )
    with torch.no_grad():
        compiled(torch.zeros(1, 8))
    assert NAME not in os.environ
    assert effective(None)["hooks: cpu, applied"] == (
        "nothing",
        "hooks lie outside a graph: `sitsopt.optimize` runs them",
    )
    strict = torch.compile(
        model(),
        backend="sits",
        options={"recipe": {"hooks": {"cpu": {}}}, "lowering": "eager", "strict": True},
    )
    with pytest.raises(Exception, match="hooks lie outside a graph") as raised:
        strict(torch.zeros(1, 8))
    chain = [raised.value, raised.value.__cause__, raised.value.__context__]
    assert any(isinstance(each, LoweringError) for each in chain)


def test_the_guard_leaves_the_graphs() -> None:
    """Memory fails inside a compiled call: the call is made again, op by op, with the same answer."""
    one = sitsopt.optimize(model(), {"hooks": {"guard": {}}}, lowering="eager")
    x = torch.arange(16.0).view(2, 8)
    with torch.no_grad():
        expected = one(x)
        guarded = one._compiled_call_impl
        assert isinstance(guarded, Guarded) and torch.equal(expected, one[1](one[0](x)))
        dispatcher = guarded.call
        assert len(dispatcher.entries) == 1

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("as if")

        guarded.call = fail
        assert torch.equal(one(x), expected)
    assert guarded.taken() == {1: ["pools", "graphs"]}
    assert dispatcher.entries == []
    events = hooked.hooks_of(one).json()["reports"]["guard"]["events"]  # type: ignore[union-attr]
    assert [e["step"] for e in events] == ["pools", "cache", "speculation", "graphs"]
    assert [e["done"].startswith("nothing:") for e in events] == [False, True, True, False]


def test_weights_that_were_released_keep_the_graphs() -> None:
    recipe = {
        "weights": [{"match": "0", "scheme": "int8", "release": True}],
        "hooks": {"guard": {}},
    }
    one = sitsopt.optimize(model(), recipe, lowering="eager")
    step = {s.name: s for s in one._compiled_call_impl.steps}["graphs"]
    assert step.missing(None) == "the full-precision weights were released"


def test_other_parts_add_their_steps() -> None:
    from sitsopt.runtime.hooks.stepdown import Step

    one = sitsopt.optimize(model(), {"hooks": {"guard": {}}}, lowering="eager")
    sessions_of(one)[-1].extra["guard_steps"] = {
        "speculation": Step("speculation", lambda call: "one token at a time")
    }
    hooked.install(one, sessions_of(one)[-1])
    step = {s.name: s for s in one._compiled_call_impl.steps}["speculation"]
    assert step.take(None) == "one token at a time"


def test_a_copy_is_not_guarded() -> None:
    import copy

    one = sitsopt.optimize(model(), {"hooks": {"guard": {}}}, lowering="eager")
    assert copy.deepcopy(one)._compiled_call_impl is None
