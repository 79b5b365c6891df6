"""Calling the backend by its name, and asking what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sitsopt.rewrite.record import GraphRecord
from sitsopt.session import sessions_of


def sits(
    fn: Any, lowering: str = "eager", torch_options: dict[str, Any] | None = None, **options: Any
) -> Any:
    """`fn` compiled with this backend; without a compiler behind it unless another `lowering` is asked for."""
    given = {"lowering": lowering, **options}
    return torch.compile(fn, backend="sits", options=given, **(torch_options or {}))


def graphs(fn: Any) -> list[GraphRecord]:
    """Records of every graph compiled for a model or function so far."""
    return [g for s in sessions_of(fn) for g in s.record.graphs]


def fired(fn: Any) -> set[str]:
    return {s.rule for g in graphs(fn) for s in g.sites}


class Mlp(nn.Module):
    """A gated block with a residual and a norm: several shipped rules fire on it."""

    def __init__(self, size: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size, eps=1e-6)
        self.gate = nn.Linear(size, inner, bias=False)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class ConvNet(nn.Module):
    """Convolutions, batch norms and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip
        for m in self.body:
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.uniform_(-1, 1)
                m.running_var.uniform_(0.5, 2)
                nn.init.uniform_(m.weight, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def raised(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return error
    return None
