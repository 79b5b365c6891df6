"""Code and folded values are found again only for what they were made for (D09)."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from tests.backend.support import sits
from tests.cases.harness import every_second, identity, transpose_back


class Norm(nn.Module):
    """One weight under several constants."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Folded(nn.Module):
    """A convolution and a norm whose parameters several models share."""

    def __init__(self, conv: nn.Conv2d, bn: nn.BatchNorm2d, eps: float) -> None:
        super().__init__()
        self.conv, self.bn, self.eps = conv, bn, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b = self.bn
        y = self.conv(x)
        return F.batch_norm(
            y, b.running_mean, b.running_var, b.weight, b.bias, False, 0.1, self.eps
        )


def agree(models: list[nn.Module], inputs: list[torch.Tensor], lowering: str) -> None:
    """Every model on every input, twice and in turns."""
    runs = [sits(m, lowering) for m in models]
    with torch.no_grad():
        for _, (model, run), x in itertools.product(
            range(2), zip(models, runs, strict=True), inputs
        ):
            low = 1e-4 if x.dtype == torch.float32 else 3e-2
            torch.testing.assert_close(run(x), model(x), rtol=low, atol=low)


def test_one_weight_under_several_constants() -> None:
    torch._dynamo.reset()
    weight = nn.Parameter(torch.rand(16) + 0.5)
    models: list[nn.Module] = [Norm(weight, eps) for eps in (1e-6, 0.5, 3.0)]
    agree(models, [torch.randn(1, 16), torch.randn(4, 16)], "auto")


def test_folds_of_one_parameter_under_several_constants() -> None:
    torch._dynamo.reset()
    conv, bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()
    bn.running_var.uniform_(0.5, 2)
    models: list[nn.Module] = [Folded(conv, bn, eps).eval() for eps in (1e-5, 0.5, 3.0)]
    agree(models, [torch.randn(1, 3, 6, 6), torch.randn(4, 3, 6, 6)], "eager")


def test_layouts_dtypes_and_sizes_of_one_function() -> None:
    def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * y

    torch._dynamo.reset()
    run = sits(gate, "auto")
    variants = list(
        itertools.product(
            (1, 4), (torch.float32, torch.bfloat16), (identity, transpose_back, every_second)
        )
    )
    for _, (rows, dtype, layout) in itertools.product(range(2), variants):
        x, y = (layout(torch.randn(rows, 32).to(dtype)) for _ in range(2))
        low = 1e-5 if dtype == torch.float32 else 2e-2
        with torch.no_grad():
            torch.testing.assert_close(run(x, y), gate(x, y), rtol=low, atol=low)
