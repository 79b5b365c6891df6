"""What every kernel test needs: poisoned outputs, values that break things, an f64 yardstick."""

from __future__ import annotations

import torch

from sitsopt.emit.triton.source import Source
from sitsopt.runtime.triton.interpreter import interpret

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
UNITS = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}  # the spacing of values next to 1
POISON = 77.0


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that no kernel would leave as it is."""
    return torch.full(shape, POISON).to(dtype)


def launch(source: Source, grid: tuple[int, ...], *args: object) -> None:
    """Run the text in the interpreter; a trailing guard page of every output is the caller's to check."""
    interpret(source, grid, list(args))


def close(got: torch.Tensor, want: torch.Tensor, dtype: str, roundings: float = 1.0) -> None:
    """Within a number of half units of the dtype of the f64 value; NaN and infinities in the same places."""
    got, want = got.double(), want.double()
    assert torch.equal(got.isnan(), want.isnan()), "NaN in other places"
    largest = torch.finfo(DTYPES[dtype]).max
    want = torch.where(want.abs() > largest * (1 + UNITS[dtype] / 4), want.sign() * torch.inf, want)
    same = (got == want) | got.isnan()
    tiny = {"f32": 1e-37, "f16": 2.0**-24, "bf16": 1e-37}[dtype]
    slack = (
        roundings * (UNITS[dtype] / 2 * want.abs() * 1.01 + tiny) + roundings * 2e-6 * want.abs()
    )
    wrong = ~same & ((got - want).abs() > slack)
    assert not wrong.any(), f"{int(wrong.sum())} wrong, worst {(got - want)[wrong].abs().max()}"


def hard_values(*shape: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Random values with one outlier, zeros, denormals and equal runs among them."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    flat = x.view(-1)
    if flat.numel() >= 8:
        flat[0], flat[1], flat[2] = 1000.0, 0.0, -0.0
        flat[3] = 1e-40 if dtype != "f16" else 3e-7
        flat[4:7] = 0.5
    return x.to(DTYPES[dtype])
