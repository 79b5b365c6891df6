"""Norms and softmax in the interpreter against f64."""

from __future__ import annotations

import pytest
import torch

from sitsopt.emit.rowwise import Rowwise
from sitsopt.emit.triton import rowwise
from tests.triton.harness import DTYPES, close, hard_values, launch, poisoned

EPS = 1e-5


def run(kernel: Rowwise, x, residual=None, weight=None, bias=None, scalar: float = EPS):
    rows, size = x.shape
    source = rowwise.source(kernel)
    total = poisoned(rows, size, dtype=x.dtype)
    stored = {"": x.dtype, "i8": torch.int8, "f8e4m3": torch.uint8}[kernel.quantize]
    out, scale = poisoned(rows, size, dtype=stored), poisoned(rows, 1)
    args = [
        x,
        *([residual, total] if kernel.residual else []),
        *(p for p in (weight, bias) if p is not None),
    ]
    args += [out, *([scale] if kernel.quantize else []), scalar, rows, x.stride(0)]
    args += [residual.stride(0)] if kernel.residual else []
    launch(source, rowwise.grid(source, rows), *args)
    return out, total, scale


def rms(x, weight=None, offset=0.0, round_to=None):
    wide = x.double()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    if round_to is not None:
        y = y.to(round_to).double()
    return y if weight is None else y * (weight.double() + offset)


SIZES = [1, 3, 37, 64, 576, 1031, 4096]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(dtype: str, size: int) -> None:
    x, w = hard_values(5, size, dtype=dtype), torch.randn(size).to(DTYPES[dtype])
    out, _, _ = run(Rowwise("rms_norm", dtype, size, weight=dtype), x, weight=w)
    # Rounded twice, as Llama's own code does.
    close(out, rms(x, w), dtype, roundings=2.2)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_gemma_and_strided_rows(dtype: str) -> None:
    x = hard_values(6, 80, dtype=dtype)[:, :72]
    w = torch.randn(72).to(DTYPES[dtype])
    kernel = Rowwise("rms_norm", dtype, 72, weight=dtype, offset=1.0, round_first=False)
    out, _, _ = run(kernel, x, weight=w)
    close(out, rms(x, w, 1.0), dtype)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("size", [1, 64, 97])
def test_residual(dtype: str, size: int) -> None:
    x, r = hard_values(9, size, dtype=dtype), hard_values(9, size, dtype=dtype, seed=1)
    out, total, _ = run(Rowwise("rms_norm", dtype, size, residual=True), x, residual=r)
    assert torch.equal(total, x + r)
    close(out, rms(x + r), dtype)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("size", [1, 5, 768])
def test_layer_norm(dtype: str, size: int) -> None:
    x = hard_values(4, size, dtype=dtype)
    w, b = torch.randn(size).to(DTYPES[dtype]), torch.randn(size)
    kernel = Rowwise("layer_norm", dtype, size, weight=dtype, bias="f32")
    out, _, _ = run(kernel, x, weight=w, bias=b)
    want = torch.nn.functional.layer_norm(x.double(), (size,), w.double(), b.double(), EPS)
    # x - mean cancels: an absolute error of f32 remains, as large as the outlier makes it.
    close(torch.where((out.double() - want).abs() < 2e-5, want, out.double()), want, dtype, 1.1)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_softmax(dtype: str, size: int) -> None:
    x = torch.randn(4, size).to(DTYPES[dtype])
    x[0] = 0.5
    if size > 3:
        x[1, 2], x[2, 1], x[3] = float("-inf"), float("nan"), float("-inf")
    out, _, _ = run(Rowwise("softmax", dtype, size), x, scalar=0.7)
    close(out, torch.softmax(x.double() * 0.7, -1), dtype, 1.2)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax"])
def test_rows_longer_than_a_block(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "LONGEST_BLOCK", 64)
    x, r = torch.randn(3, 9001), torch.randn(3, 9001)
    x[1] = float("-inf") if op == "softmax" else 3.0
    kernel = Rowwise(op, "f32", 9001, residual=op != "softmax")
    out, total, _ = run(kernel, x, residual=r, scalar=1.0 if op == "softmax" else EPS)
    want = {"rms_norm": rms(x + r), "softmax": torch.softmax(x.double(), -1)}.get(op)
    if want is None:
        want = torch.nn.functional.layer_norm((x + r).double(), (9001,), None, None, EPS)
    close(
        torch.where((out.double() - want).abs() < 1e-5 * (op != "softmax"), want, out.double()),
        want,
        "f32",
        2,
    )
    if op != "softmax":
        assert torch.equal(total, x + r)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_what_is_not_a_number_stays_in_its_row(bad: str) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = float(bad)
    out, _, _ = run(Rowwise("rms_norm", "f32", 64), x)
    want = torch.nn.functional.rms_norm(x, (64,), None, EPS)
    assert torch.equal(out.isnan(), want.isnan())
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("size", [3, 64, 200])
def test_int8_epilogue(size: int) -> None:
    x, w = hard_values(5, size, dtype="bf16"), torch.randn(size).bfloat16()
    x[4] = 0.0
    kernel = Rowwise("rms_norm", "bf16", size, weight="bf16", quantize="i8")
    q, _, scale = run(kernel, x, weight=w)
    plain, _, _ = run(Rowwise("rms_norm", "bf16", size, weight="bf16"), x, weight=w)
    largest = plain.float().abs().amax(-1, keepdim=True)
    assert torch.equal(scale, torch.where(largest == 0, 1.0, largest / 127))
    assert torch.equal(q, torch.round(plain.float() / scale).to(torch.int8))


def test_fp8_epilogue_in_software_is_the_hardware_rounding() -> None:
    x = torch.randn(7, 256)
    x[1] *= torch.logspace(-9, 0, 256)
    x[2] = 0.0
    kernel = Rowwise("rms_norm", "f32", 256, quantize="f8e4m3", native_fp8=False)
    q, _, scale = run(kernel, x)
    plain, _, _ = run(Rowwise("rms_norm", "f32", 256), x)
    want = (plain / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(q, want.view(torch.uint8))
