"""Rotary embeddings in the interpreter against f64."""

from __future__ import annotations

import pytest
import torch

from sitsopt.emit.rope import Rope
from sitsopt.emit.triton import rope
from tests.triton.harness import DTYPES, close, launch, poisoned


def reference(x, cos, sin, style: str):
    x, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    n = cos.shape[-1]
    part, rest = x[..., :n], x[..., n:]
    if style == "half":
        turned = torch.cat([-part[..., n // 2 :], part[..., : n // 2]], -1)
    else:
        turned = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    return torch.cat([part * cos + turned * sin, rest], -1)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    "head_dim, rotary, batch", [(64, 0, 1), (80, 32, 3), (2, 0, 2), (128, 64, 2)]
)
def test_rope(style: str, dtype: str, head_dim: int, rotary: int, batch: int) -> None:
    heads, tokens = 3, 7
    x = torch.randn(batch, tokens, heads, head_dim).to(DTYPES[dtype]).transpose(1, 2)
    cos, sin = (torch.randn(1, tokens, rotary or head_dim).to(DTYPES[dtype]) for _ in range(2))
    out = poisoned(batch, heads, tokens, head_dim, dtype=x.dtype)
    source = rope.source(Rope(dtype, head_dim, style, rotary))
    rows = batch * heads * tokens
    strides = [*x.stride()[:3], 0, cos.stride(1), *out.stride()[:3]]
    launch(source, rope.grid(source, rows), x, cos, sin, out, rows, heads, tokens, *strides)
    want = reference(x, cos, sin, style)
    # Where the two products cancel, what is left is the rounding of the products themselves.
    near = (out.double() - want).abs() < 3e-6
    close(torch.where(near, want, out.double()), want, dtype)
