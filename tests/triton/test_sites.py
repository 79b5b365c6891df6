"""Every `sits::` op that has generated texts, in the interpreter, against its own reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sitsopt.graph import ops as references
from sitsopt.runtime.triton import ops
from sitsopt.runtime.triton.runner import INTERPRETER, NoText
from sitsopt.runtime.triton.sites import SITES

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}


def randn(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Neighbours in a row, gaps between rows, dims out of order."""
    return randn(*shape[1::-1], *shape[2:-1], shape[-1] + 3, dtype=dtype).transpose(0, 1)[
        ..., : shape[-1]
    ]


def columns(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return randn(*shape[::-1], dtype=dtype).permute(*range(len(shape) - 1, -1, -1))


def check(name: str, *args: Any, tolerance: float | None = None, **kwargs: Any) -> None:
    """The op under the interpreter against its reference in f32 or wider; shapes and strides as its fake says."""
    op = ops.interpreted(name)
    got = op(*args, **kwargs)
    if leaves(got)[0].dtype == F32:
        torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    want = references.REFERENCES[name](*wide(args), **kwargs)  # type: ignore[operator]
    for a, b in zip(leaves(got), leaves(want), strict=True):
        assert a.shape == b.shape
        limit = tolerance or TOLERANCE[a.dtype]
        torch.testing.assert_close(a.to(b.dtype), b, rtol=limit, atol=limit, equal_nan=True)


def wide(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(wide, value))
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return value


def leaves(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("make", [rows, columns])
def test_norms(dtype: torch.dtype, make: Any) -> None:
    x, r = make(dtype, 3, 4, 70), make(dtype, 3, 4, 70)
    gain, shift = randn(70, dtype=dtype), randn(70, dtype=dtype)
    check("rms_norm", x, gain, 1e-5)
    check("rms_norm", x, None, 1e-5)
    check("rms_norm", x, gain.float(), 1e-6, 1.0, False)
    check("add_rms_norm", x, r, gain, 1e-5)
    check("add_layer_norm", x, r, gain, shift, 1e-5)
    check("add_layer_norm", x, r, None, None, 1e-5)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_gates(dtype: torch.dtype) -> None:
    for a, b in [
        (randn(3, 5, 33, dtype=dtype), randn(3, 5, 33, dtype=dtype)),
        (rows(dtype, 3, 5, 33), columns(dtype, 3, 5, 33)),
        (randn(dtype=dtype), randn(dtype=dtype)),
        (randn(9, 2, dtype=dtype)[:, 0], randn(9, dtype=dtype)),
        (randn(4, 0, dtype=dtype), randn(4, 0, dtype=dtype)),
    ]:
        check("swiglu", a, b)
        check("geglu", a, b, "tanh")
    check("geglu", randn(7, dtype=dtype), randn(7, dtype=dtype))
    check("softcap", rows(dtype, 2, 3, 40) * 20, 30.0, tolerance=30 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rope(dtype: torch.dtype, style: str) -> None:
    x = randn(2, 5, 3, 16, dtype=dtype).transpose(1, 2)
    table = randn(2, 1, 5, 16, dtype=dtype)
    check("rope", x, table, table.flip(3), style)
    check("rope", x, table[:1], table[1:], style)
    check("rope", x.transpose(1, 2), table.transpose(1, 2), table.transpose(1, 2) + 1, style)
    check("rope", x[0], table[0, 0], table[1, 0], style)
    check("rope", x, table[..., :8], table[..., 8:], style)
    check("rope", x, table[..., :8], table[..., 8:], style, 8)
    check("rope", x[:, :, :1], table[:, :, :1], table[:, :, 1:2], style)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("count", [1, 16, 17])
def test_linears(dtype: torch.dtype, count: int) -> None:
    x = rows(dtype, 1, count, 40)
    weights = [randn(n, 40, dtype=dtype) / 6 for n in (33, 5)]
    check("linears", x, weights, [randn(33, dtype=dtype), None])
    check("linears", x, [columns(dtype, 12, 40) / 6], [None])
    for act in ("relu", "silu", "gelu", "gelu_tanh", "tanh", "sigmoid"):
        check("linear_act", x, weights[0], randn(33, dtype=dtype), act)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("tokens", [1, 7])
def test_attention(dtype: torch.dtype, tokens: int) -> None:
    q = randn(2, tokens, 6, 16, dtype=dtype).transpose(1, 2)
    k, v = (randn(2, 2, 70, 16, dtype=dtype) for _ in range(2))
    keep = torch.rand(2, 1, tokens, 70) > 0.3
    added = torch.where(keep, 0.0, torch.finfo(dtype).min).to(dtype)
    nothing = keep.clone()
    nothing[0] = False
    near = {"tolerance": 2e-5 if dtype == F32 else 2e-2}
    check("attention", q, k, v, None, 0.3, **near)
    check("attention", q, k, v, keep, 0.25, **near)
    check("attention", q, k, v, keep[:1, :, :1], 0.25, **near)
    check("attention", q, k, v, added, 0.25, False, 5.0, **near)
    check("attention", q, k, v, None, 0.25, True, **near)
    check("attention", q, k, v, nothing, 0.25, **near)
    check("attention", q, k, v, nothing, 0.25, False, 0.0, None, False, **near)
    check("attention", q, k, v, keep, 0.25, False, 0.0, randn(6, dtype=dtype), False, **near)
    check("attention", q[..., :8], k[..., 8:], v[:, :, :, :4], None, 0.3, **near)


@pytest.mark.parametrize(
    "name, args, reason",
    [
        ("rms_norm", (randn(2, 8, dtype=F16), randn(8), 1e-5), "another dtype"),
        ("rms_norm", (randn(2, 8).double(), None, 1e-5), "float64"),
        ("add_rms_norm", (randn(2, 8), randn(8), None, 1e-5), "shape"),
        ("swiglu", (randn(2), randn(2, dtype=F16)), "dtype"),
        ("rope", (randn(2, 3, 4, dtype=F16), randn(3, 4), randn(3, 4), "half"), "another dtype"),
        ("rope", (randn(2, 3, 4, 8), *[randn(2, 3, 4, 8)] * 2, "half"), "every head"),
        ("linears", (randn(2, 8), [randn(3, 8, dtype=F16)], [None]), "dtype"),
    ],
)
def test_forms_without_a_text_say_which(name: str, args: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(NoText, match=reason):
        SITES[name](INTERPRETER, *args)
