"""Matrix products in the interpreter against f64."""

from __future__ import annotations

import pytest
import torch

from sitsopt.emit.matmul import Matmul
from sitsopt.emit.triton import matmul
from sitsopt.runtime.triton.interpreter import interpret
from sitsopt.runtime.triton.product import (
    Around,
    Weight,
    multiply,
    pack_fp8,
    pack_int4,
    pack_int8,
    unpack,
)
from tests.triton.harness import DTYPES

SLACK = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}
ACTS = {
    "": lambda x: x,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


def pack(kernel: Matmul, w: torch.Tensor) -> Weight:
    if kernel.weight == "i8":
        return pack_int8(w)
    if kernel.weight == "i4":
        return pack_int4(w, kernel.group, kernel.low)
    if kernel.weight == "f8e4m3":
        return pack_fp8(w, kernel.group)
    return Weight(w)


def check(kernel: Matmul, rows: int, *, seed: int = 0, **blocks: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    kind = DTYPES[kernel.dtype]
    x = torch.randn(rows, kernel.k + 16, generator=draw)[:, : kernel.k].to(kind)
    w = (torch.randn(kernel.rows, kernel.k, generator=draw) / kernel.k**0.5).to(kind)
    packed = pack(kernel, w)
    around = Around(
        gain=torch.randn(kernel.k, generator=draw).to(kind),
        eps=1e-5,
        bias=torch.randn(kernel.rows, generator=draw).to(kind),
        residual=torch.randn(rows, kernel.n, generator=draw).to(kind),
    )
    y = torch.full((rows, kernel.n), 77.0).to(kind)
    source = matmul.source(kernel)
    source = source.tuned({**({} if kernel.skinny else {"ROWS": 16, "COLS": 32}), **blocks}, 4, 1)
    multiply(interpret, kernel, x, packed, around, y, units=3, source=source)
    wide = x.double()
    if kernel.norm:
        wide = wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-5)
        wide = wide * (around.gain.double() + kernel.offset)
    want = wide @ unpack(packed, kernel).t()
    if kernel.bias:
        want = want + around.bias.double()
    if kernel.gated:
        want = ACTS[kernel.act](want[:, : kernel.n]) * want[:, kernel.n :]
    else:
        want = ACTS[kernel.act](want)
    if kernel.residual:
        want = want + around.residual.double()
    slack = SLACK[kernel.dtype] * (3 if kernel.norm else 1) * (1 + want.abs())
    error = (y.double() - want).abs()
    assert (error <= slack).all(), (error / slack).max()


@pytest.mark.parametrize("skinny", [True, False], ids=["skinny", "wide"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rows, n, k", [(1, 128, 128), (5, 67, 97), (16, 1, 1), (0, 8, 8)])
def test_plain(dtype: str, rows: int, n: int, k: int, skinny: bool) -> None:
    check(Matmul(dtype, n, k, skinny=skinny), rows)


SCHEMES = {
    "int8": {"weight": "i8"},
    "int4 32": {"weight": "i4", "group": 32},
    "int4 64 low": {"weight": "i4", "group": 64, "low": True},
    "int4 128": {"weight": "i4", "group": 128},
    "fp8": {"weight": "f8e4m3", "native_fp8": False},
    "fp8 blocks": {"weight": "f8e4m3", "group": 128, "native_fp8": False},
}


@pytest.mark.parametrize("skinny", [True, False], ids=["skinny", "wide"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized(scheme: str, dtype: str, skinny: bool) -> None:
    check(Matmul(dtype, 80, 384, skinny=skinny, **SCHEMES[scheme]), 3)


ENDS = {
    "norm": {"norm": True},
    "gemma norm": {"norm": True, "offset": 1.0, "round_first": False},
    "bias gelu": {"bias": True, "act": "gelu_tanh"},
    "residual": {"residual": True, "bias": True},
    "gated": {"gated": True, "act": "silu"},
    "all int4": {
        "norm": True, "gated": True, "act": "silu", "bias": True, "residual": True,
        "weight": "i4", "group": 32, "low": True,
    },
    "gated int8": {"gated": True, "act": "silu", "weight": "i8"},
    "gated fp8": {"gated": True, "act": "relu", "weight": "f8e4m3", "group": 128, "native_fp8": False},
}  # fmt: skip


@pytest.mark.parametrize("skinny", [True, False], ids=["skinny", "wide"])
@pytest.mark.parametrize("end", ENDS)
def test_ends(end: str, skinny: bool) -> None:
    check(Matmul("f16", 128, 256, skinny=skinny, **ENDS[end]), 4)


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_splits(splits: int) -> None:
    check(Matmul("f16", 40, 640), 2, SPLITS=splits)


def test_split_sums_leave_their_counters_at_zero() -> None:
    kernel = Matmul("f16", 64, 512)
    for seed in range(3):
        check(kernel, 16, seed=seed)


@pytest.mark.parametrize("inputs", ["i8"])
def test_quantized_inputs(inputs: str) -> None:
    kernel = Matmul("f16", 96, 256, weight="i8", inputs=inputs, skinny=False)
    x = torch.randint(-127, 128, (20, 256), dtype=torch.int8)
    x_scale = torch.rand(20) * 0.01
    weight = pack_int8(torch.randn(96, 256))
    y = torch.full((20, 96), 77.0).half()
    source = matmul.source(kernel).tuned({"ROWS": 16, "COLS": 32}, 4, 1)
    multiply(interpret, kernel, x, weight, Around(x_scale=x_scale), y, units=2, source=source)
    want = (x.double() * x_scale.double()[:, None]) @ unpack(weight, kernel).t()
    torch.testing.assert_close(y.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_what_is_not_a_number_stays_in_its_row(bad: str) -> None:
    kernel = Matmul("f32", 64, 64)
    x, w = torch.randn(3, 64), torch.randn(64, 64).abs()
    x[1, 5] = float(bad)
    y = torch.full((3, 64), 77.0)
    multiply(interpret, kernel, x, Weight(w), Around(), y)
    assert torch.equal(y.isfinite().all(1), torch.tensor([True, False, True]))
