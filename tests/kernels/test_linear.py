"""Skinny linears and gated linears against f64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from sitsopt.runtime import kernels
from tests.kernels.harness import BF16, DTYPES, F16, F32, INF, assert_close, needs_kernels, randn

pytestmark = needs_kernels


def check_linears(x, weights, biases=None):
    biases = biases or [None] * len(weights)
    outs = kernels.lookup("linears", dtype=x.dtype)(x, weights, biases)
    assert len(outs) == len(weights)
    for out, w, b in zip(outs, weights, biases, strict=True):
        exact = F.linear(x.double(), w.double(), None if b is None else b.double())
        added = F.linear(x.double().abs(), w.double().abs())
        added = added[added.isfinite()].max().item() if added.isfinite().any() else 0.0
        assert_close(out, exact, F.linear(x, w, b), largest=added if x.dtype == F32 else None)
        assert out.is_contiguous()
    return outs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [1, 7, 31, 32, 33, 100, 256, 577])
def test_shapes(K, dtype):
    for rows, N in itertools.product([1, 2, 3, 5, 8, 13, 16, 17], [1, 5, 16, 50]):
        weights = [randn(N, K, dtype=dtype), randn(N + 3, K, dtype=dtype, seed=4)]
        check_linears(
            randn(rows, K, dtype=dtype, seed=1), weights, [None, randn(N + 3, dtype=dtype)]
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_longer_than_the_cache(dtype):
    for rows in (1, 2, 16):
        check_linears(randn(rows, 16384, dtype=dtype), [randn(20, 16384, dtype=dtype)])


def test_leading_dims_and_layouts():
    w = [
        randn(40, 64, dtype=BF16),
        randn(24, 128, dtype=BF16)[:, ::2],
        randn(64, 24, dtype=BF16).mT,
    ]
    w += [randn(24, 80, dtype=BF16)[:, 8:72], randn(48, 64, dtype=BF16)[::2]]
    base = randn(2, 3, 128, dtype=BF16)
    for x in (base[..., :64], base[..., ::2], base[:, :, 64:], base[0, 0, :64], base[:, 1:2, :64]):
        check_linears(x, w)
    assert check_linears(base[:, :0, :64], w)[0].shape == (2, 0, 40)


def test_no_weights_and_no_width():
    op = kernels.lookup("linears", dtype=F32)
    assert op(randn(2, 3), [], []) == []
    assert op(randn(2, 3), [randn(0, 3)], [None])[0].shape == (2, 0)
    assert torch.equal(
        op(torch.empty(2, 0), [torch.empty(4, 0)], [randn(4)])[0], randn(4).expand(2, 4)
    )


def test_what_does_not_fit_is_what_eager_makes_of_it():
    op = kernels.lookup("linears", dtype=BF16)
    x = randn(2, 8, dtype=BF16)
    with pytest.raises(RuntimeError):
        op(x, [randn(4, 9, dtype=BF16)], [None])
    with pytest.raises(RuntimeError):
        op(x, [randn(4, 8)], [None])
    with pytest.raises(RuntimeError, match="biases"):
        op(x, [randn(4, 8, dtype=BF16)], [])
    assert op(x.double(), [randn(4, 8).double()], [None])[0].dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [INF, -INF, float("nan"), 1e-39, 3e4])
def test_values(value, dtype):
    """Special values stay where they are; equal numbers and zeros are exact."""
    for rows in (1, 3):
        w, x = randn(33, 70, dtype=dtype), randn(rows, 70, dtype=dtype)
        w[5, 3] = value
        check_linears(x, [w])
        x[0, 69] = value
        check_linears(x, [w])
    ones = torch.ones(2, 512, dtype=dtype)
    assert (check_linears(ones, [torch.ones(7, 512, dtype=dtype)])[0] == 512).all()
    assert not check_linears(ones * 0, [w.new_ones(7, 512)])[0].any()


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(dtype, act):
    """act(gate) * up rounds once; what no kernel takes rounds at each step, as eager does."""
    op = kernels.lookup("gated", dtype=dtype)
    wg, wu = randn(50, 96, dtype=dtype), randn(50, 96, dtype=dtype, seed=3)
    bg, bu = randn(50, dtype=dtype), randn(50, dtype=dtype, seed=3)
    for rows, biased in itertools.product([1, 2, 7, 16, 40], [False, True]):
        x = randn(rows, 96, dtype=dtype) * 0.3
        biases = (bg, bu) if biased else (None, None)

        def spelled(x, wg, wu, bg, bu):
            gate = F.linear(x, wg, bg)
            gate = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")
            return gate * F.linear(x, wu, bu)

        exact = spelled(*(None if t is None else t.double() for t in (x, wg, wu, *biases)))
        assert_close(op(x, wg, wu, *biases, act), exact, spelled(x, wg, wu, *biases), slack=2e-6)


def test_gated_far_out():
    """Where exp leaves the range of f32, silu is the identity or zero."""
    op = kernels.lookup("gated", dtype=F32)
    x = torch.tensor([[1.0]])
    gates = torch.tensor(
        [-INF, -1e4, -200.0, -87.5, -20.0, 0.0, 20.0, 88.0, 200.0, 1e30, INF, float("nan")]
    )
    ours = op(x, gates[:, None], torch.ones(12, 1), None, None, "silu")[0]
    want = F.silu(gates.double())
    assert torch.equal(ours.isnan(), want.isnan())
    assert torch.allclose(ours.double(), want, rtol=1e-6, atol=1e-35, equal_nan=True)
    ours = op(x, gates[1:10, None], torch.ones(9, 1), None, None, "gelu_tanh")[0]
    want = F.gelu(gates[1:10].double(), approximate="tanh")
    assert torch.allclose(ours.double(), want, rtol=1e-6, atol=1e-7)


def test_gated_refuses_other_activations():
    w = randn(4, 8, dtype=F16)
    with pytest.raises(RuntimeError, match="silu or gelu_tanh, not relu"):
        kernels.lookup("gated", dtype=F16)(randn(1, 8, dtype=F16), w, w, None, None, "relu")
