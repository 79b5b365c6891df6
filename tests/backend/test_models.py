"""Models that are no language models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.backend.support import ConvNet, fired, graphs, sits


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 3)

    def forward(self, ids, offsets):
        return self.head(self.bag(ids, offsets)).log_softmax(-1)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(6, 8), nn.LSTMCell(8, 8)

    def forward(self, xs):
        h, state = torch.zeros(xs.shape[1], 8), None
        for x in xs:
            h = self.gru(x, h)
            state = self.lstm(h, state)
        return state


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(3, 6, 3, padding="same", groups=3)
        self.up = nn.ConvTranspose2d(3, 4, 2, stride=2)
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, signal, image):
        a = nn.functional.max_pool1d(self.norm(self.one(signal)), 2)
        b = nn.functional.interpolate(self.up(image), scale_factor=0.5, mode="bilinear")
        return a, b.clamp(-1, 1), nn.functional.pixel_shuffle(b, 2)


class Mixed(nn.Module):
    """Attention of torch's own, a gate over experts, sorting, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.router, self.experts = nn.Linear(16, 3), nn.Parameter(torch.randn(3, 16, 16) / 4)

    def forward(self, x):
        x, weights = self.attention(x, x, x)
        chosen = self.router(x).softmax(-1).topk(2, -1)
        every = torch.einsum("btd,edk->btek", x, self.experts)
        taken = every.gather(2, chosen.indices.unsqueeze(-1).expand(-1, -1, -1, 16))
        return (taken * chosen.values.unsqueeze(-1)).sum(2), weights, x.sort(-1).values, x.cumsum(1)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "convnet": (ConvNet, lambda: (torch.randn(2, 3, 8, 8),)),
    "bags": (Bags, lambda: (torch.randint(0, 20, (9,)), torch.tensor([0, 4, 4]))),
    "cells": (Cells, lambda: (torch.randn(4, 2, 6),)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        lambda: (torch.randn(2, 5, 16),),
    ),
    "encoder, norm first": (
        lambda: nn.TransformerEncoderLayer(
            16, 4, 32, batch_first=True, norm_first=True, activation="gelu"
        ),
        lambda: (torch.randn(2, 5, 16),),
    ),
    "pool": (Pool, lambda: (torch.randn(2, 3, 10), torch.randn(2, 3, 4, 4))),
    "mixed": (Mixed, lambda: (torch.randn(2, 5, 16),)),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, training: bool) -> None:
    make, inputs = CASES[name]
    model = make().train(training)
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    if isinstance(getattr(model, "self_attn", None), nn.MultiheadAttention):
        model.self_attn.dropout = 0.0
    args = inputs()
    run = sits(model)
    with torch.no_grad():
        torch.testing.assert_close(run(*args), model(*args), rtol=1e-4, atol=1e-4)
    found = []
    for f in (model, run):
        out = torch.utils._pytree.tree_leaves(f(*args))
        loss = sum(t.pow(2).mean() for t in out if t.requires_grad)
        found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["convnet", "encoder", "mixed"])
def test_through_inductor(name: str) -> None:
    make, inputs = CASES[name]
    model, args = make().eval(), inputs()
    with torch.no_grad():
        torch.testing.assert_close(sits(model, "auto")(*args), model(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_conv_net_of_low_precision(dtype: torch.dtype) -> None:
    model = ConvNet().eval().to(dtype)
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(sits(model)(x), model(x), rtol=5e-2, atol=5e-2)
    assert "fold/conv_bn" in fired(model)


def test_channels_last() -> None:
    model = ConvNet().eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for lowering in ("eager", "auto"):
            torch._dynamo.reset()
            torch.testing.assert_close(sits(model, lowering)(x), model(x), rtol=1e-4, atol=1e-4)


def test_vmap_and_gradients_inside() -> None:
    def f(w, x):
        def loss(w, x):
            return (nn.functional.silu(x @ w) * x.sum()).sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)

    w, x = torch.randn(4, 4), torch.randn(3, 4)
    torch.testing.assert_close(sits(f)(w, x), f(w, x))


def test_control_flow_ops() -> None:
    def f(x, y):
        return torch.cond(
            x.sum() > 0, lambda x, y: nn.functional.silu(x) * y, lambda x, y: x - y, (x, y)
        )

    run = sits(f)
    for sign in (1, -1):
        x, y = torch.rand(3, 4) * sign, torch.randn(3, 4)
        torch.testing.assert_close(run(x, y), f(x, y))
    assert graphs(f)


def test_custom_autograd_functions() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 3 * x * g  # on purpose not the derivative

    def f(x):
        return nn.functional.silu(Square.apply(x)) * x

    x = torch.randn(4, requires_grad=True)
    (a,), (b,) = (torch.autograd.grad(g(x).sum(), x) for g in (f, sits(f)))
    torch.testing.assert_close(a, b)
