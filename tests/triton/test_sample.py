"""Token choice in the interpreter against sorting."""

from __future__ import annotations

import pytest
import torch

from sitsopt.emit.sample import Argmax, Draw
from sitsopt.emit.triton import sample
from tests.triton.harness import DTYPES, launch


def argmax(x: torch.Tensor, dtype: str) -> torch.Tensor:
    source = sample.argmax(Argmax(dtype)).tuned({"BLOCK": 64}, 4, 1)
    rows, splits = x.shape[0], source.constant("SPLITS")
    out = torch.full((rows,), -7)
    part, lock = torch.full((rows, splits), 77), torch.zeros(rows, dtype=torch.int32)
    launch(source, (rows, splits), x, part, lock, out, x.shape[1], x.stride(0))
    assert not lock.any()
    return out


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("size", [1, 63, 3001])
def test_argmax(dtype: str, size: int) -> None:
    x = torch.randn(3, size).to(DTYPES[dtype])
    x[1] = float("-inf")
    x[2] = -3.0
    assert argmax(x, dtype).tolist() == x.float().argmax(-1).tolist()


def test_argmax_of_zeros_and_nan() -> None:
    x = torch.full((2, 200), -0.0)
    x[0, 100], x[1, 50], x[1, 20] = 0.0, float("nan"), float("inf")
    assert argmax(x, "f32").tolist() == [0, 50]


def draw(x, uniform, temperature=1.0, k=0, p=1.0, dtype="f32"):
    source = sample.draw(Draw(dtype)).tuned({"BLOCK": 256}, 4, 1)
    out = torch.full((x.shape[0],), -7)
    launch(source, (x.shape[0],), x, uniform, out, 1 / temperature, p, k, x.shape[1], x.stride(0))
    return out


def kept(x: torch.Tensor, temperature: float, k: int, p: float) -> torch.Tensor:
    """The distribution after both cuts, in f64, in the order of Hugging Face's warpers."""
    x = x.double() / temperature
    if k:
        x = x.masked_fill(x < x.topk(min(k, x.numel())).values[-1], float("-inf"))
    probs = torch.softmax(x, -1)
    if p < 1:
        above = torch.tensor([probs[probs > one].sum() for one in probs])
        probs = torch.where(above < p, probs, 0.0)
    return probs / probs.sum()


@pytest.mark.parametrize(
    "temperature, k, p", [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (0.9, 40, 0.6), (1, 1, 1)]
)
def test_draw(temperature: float, k: int, p: float) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(2)) * 2
    x[5], x[6] = float("-inf"), x[7]
    uniform = torch.tensor([0.0, 0.1, 0.35, 0.5, 0.77, 0.9999999])
    got = draw(x.expand(6, -1), uniform, temperature, k, p)
    probs = kept(x, temperature, k, p)
    after = probs.cumsum(0)[got]
    before = after - probs[got]
    assert (probs[got] > 0).all()
    assert (before <= uniform + 1e-5).all() and (uniform <= after + 1e-5).all()


def test_all_equal_logits_are_all_kept() -> None:
    x = torch.zeros(1, 100)
    assert draw(x, torch.tensor([0.995]), k=3, p=0.5).item() == 99
