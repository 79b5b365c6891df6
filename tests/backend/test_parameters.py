"""Parameters change after compiling (Q14): results follow them, whichever way they change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.backend.support import ConvNet, Mlp, fired, sits


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(13, 16), nn.RMSNorm(16, eps=1e-6)
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (Mlp, lambda: torch.randn(3, 16)),
    "convnet": (ConvNet, lambda: torch.randn(2, 3, 8, 8)),
    "tied": (Tied, lambda: torch.tensor([[1, 2, 12]])),
}


def other(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict of other values."""
    return {
        k: v + torch.rand_like(v) * 0.5 if v.is_floating_point() else v.clone()
        for k, v in model.state_dict().items()
    }


@torch.no_grad()
def by_copy(model: nn.Module) -> None:
    for p, v in zip(model.parameters(), other(model).values(), strict=False):
        p.copy_(torch.rand_like(p) if p.shape != v.shape else v)


def by_data_copy(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.copy_(torch.rand_like(p))


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.rand_like(p.data)


def by_item_of_data(model: nn.Module) -> None:
    """One element, without a new version or address."""
    for p in model.parameters():
        p.data.view(-1)[-1] += 3


def by_rows_of_data(model: nn.Module) -> None:
    """The same numbers in another order."""
    for p in model.parameters():
        p.data.copy_(p.data.flip(0))


def by_numpy(model: nn.Module) -> None:
    """Behind torch's back."""
    for p in model.parameters():
        p.detach().numpy().flat[0] += 2.0


def by_setattr(model: nn.Module) -> None:
    for m in model.modules():
        for name, p in list(m.named_parameters(recurse=False)):
            setattr(m, name, nn.Parameter(torch.rand_like(p)))


def by_half_and_back(model: nn.Module) -> None:
    model.half().float()


def by_bfloat16(model: nn.Module) -> None:
    model.bfloat16()


def by_merge(model: nn.Module) -> None:
    """As adapters are merged: weight.data += B @ A."""
    for m in model.modules():
        if isinstance(m, nn.Linear):
            m.weight.data += torch.randn(m.weight.shape[0], 2) @ torch.randn(2, m.weight.shape[1])


def by_buffers(model: nn.Module) -> None:
    for b in model.buffers():
        if b.is_floating_point():
            b.data.copy_(torch.rand_like(b) + 0.5)


def by_optimizer(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


UPDATES: dict[str, Callable[[nn.Module], Any]] = {
    "load_state_dict": lambda m: m.load_state_dict(other(m)),
    "load_state_dict, assign": lambda m: m.load_state_dict(other(m), assign=True),
    "copy_": by_copy, "data.copy_": by_data_copy, "data": by_data, "one item": by_item_of_data,
    "rows moved": by_rows_of_data, "numpy": by_numpy, "setattr": by_setattr, "half, float": by_half_and_back,
    "bfloat16": by_bfloat16, "merge": by_merge, "buffers": by_buffers, "optimizer": by_optimizer,
}  # fmt: skip


TIED = ("load_state_dict, assign", "data.copy_", "setattr", "one item")
CHANGES = [(n, u) for n in MODELS for u in UPDATES if n != "tied" or u in TIED]


@pytest.mark.parametrize("name, update", CHANGES)
def test_results_follow(name: str, update: str) -> None:
    make, inputs = MODELS[name]
    model, x = make().eval(), inputs()
    run = sits(model)
    with torch.no_grad():
        for _ in range(2):
            x = inputs() if x.is_floating_point() else x
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
            UPDATES[update](model)
            dtype = next(model.parameters()).dtype
            x = x.to(dtype) if x.is_floating_point() else x
            tolerance = 1e-4 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(run(x), model(x), rtol=tolerance, atol=tolerance)
            model.float()
    if name == "convnet":
        assert "fold/conv_bn" in fired(model)


@pytest.mark.parametrize("update", ["load_state_dict, assign", "data.copy_", "setattr", "buffers"])
def test_results_follow_through_inductor(update: str) -> None:
    model, x = ConvNet().eval(), torch.randn(2, 3, 8, 8)
    run = sits(model, "auto")
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
        UPDATES[update](model)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_hook_added_later() -> None:
    """Dynamo looks for new hooks only when asked to, whatever the backend."""
    model, x = Mlp(), torch.randn(3, 16)
    run = sits(model)
    with torch.no_grad(), torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        run(x)
        handle = model.gate.register_forward_hook(lambda m, args, out: out * 2)
        torch.testing.assert_close(run(x), model(x))
        handle.remove()
        torch.testing.assert_close(run(x), model(x))


def test_two_models_of_one_class() -> None:
    models = [ConvNet().eval() for _ in range(3)]
    runs = [sits(m) for m in models]
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        for _ in range(2):
            for model, run in zip(models, runs, strict=True):
                torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_copy_of_a_compiled_model() -> None:
    model, x = ConvNet().eval(), torch.randn(2, 3, 8, 8)
    run = sits(model)
    with torch.no_grad():
        run(x)
        twin = copy.deepcopy(model)
        by_data_copy(twin)
        torch.testing.assert_close(sits(twin)(x), twin(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
        both = copy.deepcopy(run)
        by_data(both._orig_mod)
        torch.testing.assert_close(both(x), both._orig_mod(x), rtol=1e-4, atol=1e-4)


def test_the_state_is_the_models_own() -> None:
    model = ConvNet().eval()
    before = copy.deepcopy(model.state_dict())
    run = sits(model)
    with torch.no_grad():
        run(torch.randn(2, 3, 8, 8))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert {k.removeprefix("_orig_mod.") for k in run.state_dict()} == set(before)


def test_a_model_that_is_gone_is_freed() -> None:
    import gc
    import weakref

    model = ConvNet().eval()
    run = sits(model)
    with torch.no_grad():
        run(torch.randn(2, 3, 8, 8))
    ref = weakref.ref(model.body[0].weight)
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert ref() is None
