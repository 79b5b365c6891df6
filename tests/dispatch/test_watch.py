"""The watch: what may change between calls is seen, and a look costs next to nothing when nothing did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sitsopt.dispatch.versions import Versions, available
from sitsopt.dispatch.watch import RESTLESS, Watch

pytestmark = pytest.mark.skipif(bool(available()), reason=available() or "dict versions work")


class Config:
    def __init__(self) -> None:
        self.attention = "sdpa"
        self.nested = {"theta": 1.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("scale", torch.ones(4))
        self.factor = 2.0


def test_dict_versions_see_each_kind_of_write() -> None:
    for write in (
        lambda d: d.__setitem__("a", 2), lambda d: d.pop("a"), lambda d: d.update(b=1), lambda d: d.clear(),
    ):  # fmt: skip
        dicts: list[dict[str, Any]] = [{"a": 1}, {"a": 1}]
        versions = Versions(dicts)
        assert not versions.changed()
        write(dicts[1])
        assert versions.changed()


CHANGES: list[tuple[str, Callable[[Net], Any]]] = [
    ("mode", lambda m: m.eval()),
    ("a part's mode", lambda m: m.layers[1].eval()),
    ("a weight of another kind", lambda m: setattr(m.layers[0], "weight", nn.Parameter(torch.zeros(4, 4).double()))),
    ("dtype in place", lambda m: m.to(torch.float64)),
    ("data of another dtype", lambda m: setattr(m.layers[0].weight, "data", torch.zeros(4, 4).half())),
    ("a layer replaced", lambda m: m.layers.__setitem__(0, nn.Linear(4, 4, bias=False))),
    ("a layer wrapped", lambda m: m.layers.__setitem__(0, nn.Sequential(m.layers[0]))),
    ("a layer more", lambda m: m.layers.append(nn.ReLU())),
    ("a hook", lambda m: m.layers[0].register_forward_hook(lambda *a: None)),
    ("a hook before", lambda m: m.layers[0].register_forward_pre_hook(lambda *a: None)),
    ("a global hook", lambda m: torch.nn.modules.module.register_module_forward_hook(lambda *a: None)),
    ("an attribute", lambda m: setattr(m, "factor", 3.0)),
    ("a setting", lambda m: setattr(m.config, "attention", "eager")),
    ("a nested setting", lambda m: m.config.nested.update(theta=2.0)),
    ("forward replaced", lambda m: setattr(m.layers[0], "forward", lambda x: x)),
    ("a buffer gone", lambda m: delattr(m, "scale")),
    ("tied weights", lambda m: setattr(m.layers[1], "weight", m.layers[0].weight)),
]  # fmt: skip


@pytest.mark.parametrize("change", [c for _, c in CHANGES], ids=[name for name, _ in CHANGES])
def test_each_change_is_another_model(change: Callable[[Net], Any]) -> None:
    model = Net()
    watch = Watch(model)
    before, turn = watch.digest, watch.turn
    assert watch.still()
    handle = change(model)
    try:
        assert not watch.still()
        assert watch.digest != before
        assert watch.turn > turn
        assert watch.still()
    finally:
        if isinstance(handle, torch.utils.hooks.RemovableHandle):
            handle.remove()


def test_new_values_in_place_are_the_same_model() -> None:
    model = Net()
    watch = Watch(model)
    with torch.no_grad():
        model.layers[0].weight.add_(1)
    assert watch.still()
    model.load_state_dict(Net().state_dict())
    assert watch.still()


def test_a_change_and_back_is_the_first_model_again() -> None:
    model = Net()
    watch = Watch(model)
    before = watch.digest
    model.eval()
    watch.still()
    model.train()
    watch.still()
    assert watch.digest == before


def test_a_replaced_global_of_a_watched_module_is_seen() -> None:
    import types

    module = types.ModuleType("made_up")
    module.__dict__["helper"] = len
    watch = Watch(Net())
    watch.also([vars(module)])
    assert watch.still()
    module.__dict__["helper"] = min
    turn = watch.turn
    assert not watch.still()
    assert watch.turn > turn


def test_another_method_in_a_class_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = nn.Sequential(Part())
    watch = Watch(model)
    model(torch.zeros(1))
    watch.still()
    before = watch.digest
    assert watch.still()
    Part.forward = lambda self, x: x + 2  # type: ignore[method-assign, assignment]
    assert not watch.still()
    assert watch.digest != before


def test_a_model_that_never_rests_is_known() -> None:
    model = Net()
    watch = Watch(model)
    for n in range(RESTLESS):
        assert not watch.restless
        model.factor = float(n + 10)
        watch.still()
    assert watch.restless
