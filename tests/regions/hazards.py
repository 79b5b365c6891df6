"""Models with one planted hazard each; the line of it ends in `# here`."""

from __future__ import annotations

import torch
from torch import nn

aten = torch.ops.aten


def helper_that_waits() -> None:
    torch.cuda.synchronize()  # here WAIT


class Planted(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x))
        h = getattr(self, self.kind)(h) if self.kind else h
        return self.down(h)

    def item(self, h: torch.Tensor) -> torch.Tensor:
        return h * h.sum().item()  # here ITEM

    def truth(self, h: torch.Tensor) -> torch.Tensor:
        return h + 1 if h.sum() > 1e9 else h  # here TRUTH

    def cpu(self, h: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return h + h.mean().cpu()  # here CPU

    def numpy(self, h: torch.Tensor) -> torch.Tensor:
        return h * float(h.detach().numpy()[0, 0])  # here NUMPY

    def tolist(self, h: torch.Tensor) -> torch.Tensor:
        return h * len(h.tolist())  # here TOLIST

    def nonzero(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.nonzero(h).shape[0]  # here NONZERO

    def mask(self, h: torch.Tensor) -> torch.Tensor:
        return h + h[h > 0].sum()  # here MASK

    def wait(self, h: torch.Tensor) -> torch.Tensor:
        helper_that_waits()
        return h

    def branch(self, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return torch.sin(h) if self.count % 2 else torch.cos(h)  # here BRANCH

    def fresh(self, h: torch.Tensor) -> torch.Tensor:
        self.held = [*getattr(self, "held", []), h.new_ones(16)]
        return h + self.held[-1] + self.held[0]  # here FRESH

    def numbers(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.tensor([0.5] * 16)  # here NUMBERS

    def grows(self, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return h + torch.ones(self.count * 16).sum()  # here GROWS


def line_of(mark: str) -> str:
    """`file:line` of a mark."""
    with open(__file__) as file:
        for number, line in enumerate(file, 1):
            if line.rstrip().endswith(f"# here {mark}"):
                return f"{__file__}:{number}"
    raise AssertionError(mark)
