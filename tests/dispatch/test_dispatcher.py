"""Calls of one model: equal to eager whatever changes between them, and ordinary dispatch where they must be."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sitsopt
from sitsopt.dispatch.dispatcher import Dispatcher
from sitsopt.dispatch.versions import available
from sitsopt.whole import compiled_call

pytestmark = pytest.mark.skipif(bool(available()), reason=available() or "dict versions work")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop = nn.Dropout(0.5)
        self.factor = 2.0

    def forward(self, x: torch.Tensor, scale: float = 1.0, more: Any = None) -> dict[str, Any]:
        y = self.down(torch.nn.functional.silu(self.up(self.norm(x)))) * self.factor * scale
        if more is not None:
            more["seen"].add_(1)
            y = y + more["seen"]
        return {"y": self.drop(y) + x}


def compiled(model: nn.Module, **options: Any) -> Dispatcher:
    """Without a compiler behind it: what is tested is the dispatch."""
    return compiled_call(model, {"lowering": "eager", **options})


def make() -> tuple[Net, Dispatcher]:
    torch.manual_seed(0)
    model = Net().eval()
    return model, compiled(model)


def same(model: nn.Module, call: Dispatcher, *args: Any, **kwargs: Any) -> None:
    mine = copy.deepcopy(kwargs)  # a call may write into its arguments
    got, want = call(*args, **kwargs), model(*args, **mine)
    torch.testing.assert_close(got["y"], want["y"], rtol=1e-5, atol=1e-5)
    assert not call.given_up


@torch.no_grad()
def test_one_call_compiles_and_the_next_finds_it() -> None:
    model, call = make()
    for _ in range(3):
        same(model, call, torch.randn(2, 8))
    assert len(call.entries) == 1
    report = sitsopt.report(model)
    assert [g.from_disk for g in report.record.graphs] == [False]


@torch.no_grad()
def test_each_kind_of_argument_is_told_apart() -> None:
    model, call = make()
    x = torch.randn(2, 8)
    same(model, call, x)
    same(model, call, x, 3.0)
    same(model, call, x, scale=4.0)
    same(model, call, x=x)
    same(model, call, x.t().contiguous().t())
    same(model, call, x, more={"seen": torch.zeros(8)})
    same(model, call, x)


@torch.no_grad()
def test_a_length_that_changes_becomes_dynamic() -> None:
    model, call = make()
    for rows in (5, 7, 9, 11, 6, 30):
        same(model, call, torch.randn(rows, 8))
    assert len(call.entries) <= 2  # torch remembers which sizes change, from test to test
    assert call.session.record.graphs[-1].dynamic


@torch.no_grad()
def test_changes_of_the_model_are_noticed() -> None:
    model, call = make()
    x = torch.randn(2, 8)
    same(model, call, x)
    for change in (
        lambda: model.up.weight.mul_(2),
        lambda: model.load_state_dict(Net().state_dict()),
        lambda: setattr(model.up, "weight", nn.Parameter(torch.randn(12, 8))),
        lambda: setattr(model.up.weight, "data", torch.randn(12, 8)),
        lambda: setattr(model, "factor", 5.0),
        lambda: setattr(model, "down", nn.Linear(12, 8, bias=False)),
        lambda: setattr(model.norm, "forward", lambda y: y * 3),
        lambda: model.up.register_forward_hook(lambda m, i, o: o + 1),
        lambda: model.double(),
    ):
        change()
        x = x.to(model.up.weight.dtype)
        same(model, call, x)
        same(model, call, x)


def test_training_mode_and_gradients() -> None:
    model, call = make()
    x = torch.randn(2, 8)
    same(model, call, x)
    call(x)["y"].sum().backward()
    got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x)["y"].sum().backward()
    want = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        same(model, call, x)
        model.train()
        torch.manual_seed(1)
        first = call(x)["y"]
        assert not torch.equal(first, call(x)["y"]), "dropout is on in training"
        model.eval()
        same(model, call, x)


@torch.no_grad()
def test_autocast_is_another_call() -> None:
    model, call = make()
    x = torch.randn(2, 8)
    same(model, call, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = call(x)["y"], model(x)["y"]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    same(model, call, x)


@torch.no_grad()
def test_a_wrong_call_raises_what_eager_raises_and_spoils_nothing() -> None:
    model, call = make()
    same(model, call, torch.randn(2, 8))
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(torch.randn(2, 8), nonsense=1)
    with pytest.raises(RuntimeError):
        call(torch.randn(2, 7))
    same(model, call, torch.randn(2, 8))


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()


@torch.no_grad()
def test_a_graph_break_means_ordinary_dispatch_and_is_said() -> None:
    model = Breaks()
    call = compiled(model)
    x = torch.randn(4)
    torch.testing.assert_close(call(x), model(x))
    assert call.given_up
    said = [e for e in sitsopt.report(model).record.effective if "warm starts" in e.asked]
    assert len(said) == 1
    torch.testing.assert_close(call(x), model(x))
    assert sitsopt.report(model).record.graphs


@torch.no_grad()
def test_stances_and_outer_compilers_see_the_model() -> None:
    model, call = make()
    x = torch.randn(2, 8)
    same(model, call, x)
    with torch.compiler.set_stance("force_eager"):
        same(model, call, torch.randn(3, 8))
    outer = torch.compile(lambda x: call(x)["y"] + 1, backend="eager")
    torch.testing.assert_close(outer(x), model(x)["y"] + 1)
    assert len(call.entries) == 1


@torch.no_grad()
def test_inputs_that_come_to_share_storage() -> None:
    class Adds(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a.add_(1)
            return a + b

    model = Adds()
    call = compiled(model)
    a, b = torch.zeros(4), torch.ones(4)
    assert call(a, b).tolist() == [2.0] * 4
    shared = torch.zeros(4)
    assert call(shared, shared).tolist() == [2.0] * 4
    mine, whole = torch.zeros(8), torch.zeros(8)
    want, got = model(mine[:4], mine[2:6]), call(whole[:4], whole[2:6])
    assert torch.equal(got, want)
    assert torch.equal(whole, mine)


@torch.no_grad()
def test_several_threads_get_their_own_results() -> None:
    model, call = make()
    wrong: list[str] = []

    def work(rows: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    same(model, call, torch.randn(rows, 8))
        except Exception as error:
            wrong.append(f"{rows}: {error}")

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_optimize_dispatches_and_a_deep_copy_does_not() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    want = model(torch.ones(2, 8))["y"]
    sitsopt.optimize(model, lowering="eager")
    assert isinstance(model._compiled_call_impl, Dispatcher)
    torch.testing.assert_close(model(torch.ones(2, 8))["y"], want)
    assert copy.deepcopy(model)._compiled_call_impl is None
    assert "_compiled_call_impl" not in model.state_dict()


@torch.no_grad()
def test_without_stamps_dynamo_dispatches_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sitsopt.dispatch.versions.available", lambda: "no stamps here")
    model, call = make()
    x = torch.randn(2, 8)
    torch.testing.assert_close(call(x)["y"], model(x)["y"])
    assert not call.entries
    (said,) = [e for e in sitsopt.report(model).record.effective if "warm starts" in e.asked]
    assert said.reason == "no stamps here"


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + SHIFT


SHIFT = 1.0


class UsesGlobals(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x) * 2


@torch.no_grad()
def test_globals_of_the_models_own_file_are_live(monkeypatch: pytest.MonkeyPatch) -> None:
    model = UsesGlobals()
    call = compiled(model)
    x = torch.zeros(2)
    assert call(x).tolist() == [2.0, 2.0]
    monkeypatch.setitem(globals(), "SHIFT", 3.0)
    assert call(x).tolist() == [6.0, 6.0]
    monkeypatch.setitem(globals(), "helper", lambda x: x - 1)
    assert call(x).tolist() == [-2.0, -2.0]
    assert not call.given_up


@torch.no_grad()
def test_constants_of_a_graph_come_from_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that begins its own cache concatenates with an empty tensor, which is one."""

    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.tensor([]), x.flatten()]) * torch.tensor([1.0, 2.0])

    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path))
    x = torch.tensor([3.0, 5.0])
    for from_disk in (0, 1):
        call = compiled_call(Constant(), {"lowering": "inductor"})
        assert call(x).tolist() == [3.0, 10.0]
        assert call.from_disk == from_disk
        torch._dynamo.reset()
