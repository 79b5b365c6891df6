"""Attention against f64: shapes, layouts, masks, the situations in which others went wrong."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from sitsopt.runtime import kernels
from sitsopt.runtime.kernels import load
from tests.kernels.harness import (
    BF16,
    DTYPES,
    F16,
    F32,
    INF,
    attention_f64,
    check_attention,
    needs_kernels,
    randn,
)

pytestmark = needs_kernels


def qkv(B=1, Hk=2, G=3, T=1, S=65, D=64, dtype=BF16, Dv=None, seed=0):
    return (
        randn(B, Hk * G, T, D, dtype=dtype, seed=seed),
        randn(B, Hk, S, D, dtype=dtype, seed=seed + 1),
        randn(B, Hk, S, Dv or D, dtype=dtype, seed=seed + 2),
    )


SIZES = (
    [(BF16, D) for D in (36, 64, 80, 128, 256)]
    + [(F32, D) for D in (36, 64, 128)]
    + [(F16, 64), (F16, 96)]
)


@pytest.mark.parametrize("dtype, D", SIZES)
def test_head_sizes(dtype, D):
    for T, S in [(1, 1), (1, 67), (3, 130), (17, 64)]:
        check_attention(*qkv(T=T, S=S, D=D, dtype=dtype))


@pytest.mark.parametrize("dtype, D", [(BF16, 7), (F16, 7), (F32, 33), (BF16, 1)])
def test_odd_head_sizes_read_nothing_past_the_end(dtype, D):
    """The last row of k ends where its storage ends, so a wide load there would leave the allocation."""
    check_attention(*qkv(Hk=1, G=1, S=5, D=D, dtype=dtype))


@pytest.mark.parametrize("G", [1, 3, 4, 8])
@pytest.mark.parametrize("B", [1, 2, 3])
def test_groups_and_batches(B, G):
    for T, S in [(1, 300), (5, 13), (16, 128), (31, 200)]:
        check_attention(*qkv(B=B, G=G, T=T, S=S))


@pytest.mark.parametrize("T, S", [(1, 9), (3, 9), (9, 9), (9, 3), (40, 7), (7, 40), (200, 200)])
def test_causal_is_top_left(T, S):
    """K14: with one-hot values the output shows which keys were attended."""
    q, k, _ = qkv(T=T, S=S, D=64)
    v = torch.zeros(1, 2, S, 64, dtype=BF16)
    for s in range(S):
        v[:, :, s, s % 64] = 1
    ours = check_attention(q, k, v, causal=True)
    for t in range(min(T, 64)):
        seen = (ours[0, 0, t] != 0).nonzero().flatten().tolist()
        assert seen == list(range(min(t + 1, S, 64)))


MASKS = {
    "full": (2, 6, 5, 70),
    "heads shared": (2, 1, 5, 70),
    "batches shared": (1, 6, 5, 70),
    "rows shared": (2, 1, 1, 70),
    "two dims": (5, 70),
    "keys shared": (2, 1, 5, 1),
}


@pytest.mark.parametrize("kind", ["bool", "f32", "own", "f16"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
def test_masks_broadcast(shape, kind):
    q, k, v = qkv(B=2, T=5, S=70)
    mask = randn(*shape) > -0.5
    if kind != "bool":
        mask = randn(*shape, seed=9).masked_fill(~mask, -INF)
        mask = mask.to({"f32": F32, "own": BF16, "f16": F16}[kind])
    op = kernels.lookup("attention", dtype=BF16, head_dim=64)
    if kind == "f16":  # eager refuses a mask of a third dtype
        same = op(q, k, v, mask.float(), 0.125)
        assert torch.equal(op(q, k, v, mask, 0.125), same)
    else:
        check_attention(q, k, v, mask)


def test_masks_with_any_strides():
    q, k, v = qkv(B=2, T=5, S=70)
    turned = (randn(70, 5, 2) > -0.5).permute(2, 1, 0).unsqueeze(1)
    spread = (randn(2, 1, 5, 140) > -0.5)[..., ::2]
    wide = (randn(2, 1, 5, 70) > -0.5).expand(2, 6, 5, 70)
    for mask in (turned, spread, wide, turned.float(), torch.where(spread, 0.0, -INF)):
        check_attention(q, k, v, mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 4, 40])
def test_layouts_of_q_k_v(T, dtype):
    q, k, v = qkv(B=2, T=T, S=75, dtype=dtype)
    layouts = {
        "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "slice": lambda t: F.pad(t, (3, 5))[..., 3:-5],
        "every second row": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
        "dim last but one": lambda t: t.mT.contiguous().mT,
        "one batch twice": lambda t: t[:1].expand(2, -1, -1, -1),
    }
    for a, b in itertools.product(layouts.values(), repeat=2):
        ours = check_attention(a(q), b(k), a(v))
        assert ours.stride() == torch.empty_like(a(q)).stride()


def test_value_dim_may_differ():
    assert check_attention(*qkv(Dv=32, T=3)).is_contiguous()


def test_empty_sizes():
    for B, T, S in [(0, 1, 5), (1, 0, 5), (2, 3, 0), (1, 20, 0)]:
        q, k, v = qkv(B=B, T=T, S=S)
        ours = kernels.lookup("attention", dtype=BF16, head_dim=64)(q, k, v, None, 0.1)
        assert ours.shape == q.shape and not ours.any()


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fully_masked_rows(T, dtype):
    """M04: False or -inf everywhere gives zeros, finfo.min everywhere the mean of v, also far apart from open keys."""
    q, k, v = qkv(T=T, S=300, dtype=dtype)
    low = torch.finfo(dtype).min
    for row in range(0, T, 7):
        keep = torch.ones(1, 1, T, 300, dtype=torch.bool)
        keep[..., 10:] = False
        keep[:, :, row] = False
        assert not check_attention(q, k, v, keep)[:, :, row].any()
        check_attention(q, k, v, torch.zeros(keep.shape).masked_fill(~keep, -INF).to(dtype))
        lowest = torch.zeros(keep.shape).masked_fill(~keep, low).to(dtype)
        ours = check_attention(q, k, v, lowest)
        if dtype != F16:  # in f16 the lowest number leaves the scores their say
            mean = v.double().mean(2).repeat_interleave(3, 1)
            assert torch.allclose(ours[:, :, row].double(), mean, atol=2e-2)
        lowest[..., 200:] = -INF
        check_attention(q, k, v, lowest)


def test_unsafe_rows_are_nan():
    q, k, v = qkv(T=3, S=70)
    keep = torch.ones(1, 1, 3, 70, dtype=torch.bool)
    keep[:, :, 1] = False
    for rows in (q, q.repeat(1, 1, 8, 1)):
        ours = check_attention(rows, k, v, keep.repeat(1, 1, rows.shape[2] // 3, 1), safe=False)
        assert ours[:, :, 1].isnan().all() and not ours[:, :, 0].isnan().any()


@pytest.mark.parametrize("T", [1, 4, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_and_sinks(T, dtype):
    q, k, v = qkv(T=T, S=150, dtype=dtype)
    q = q * 8
    sinks = randn(6, dtype=dtype)
    mask = randn(1, 1, T, 150) > -0.3
    mask[:, :, 0] = False
    for softcap, sink, masked in itertools.product([0.0, 2.0, 50.0], [None, sinks], [None, mask]):
        check_attention(q, k, v, masked, softcap=softcap, sinks=sink)
    check_attention(q, k, v, causal=True, softcap=5.0, sinks=sinks)


def test_without_a_kernel_the_op_takes_the_long_way():
    """f64 has no kernel: softcap, sinks and masks then go through ATen, with equal meaning."""
    q, k, v = (t.double() for t in qkv(T=5, S=40))
    op = torch.ops.sits_cpp.attention
    mask, sinks = randn(1, 1, 5, 40) > 0, randn(6)
    for softcap, sink, causal, safe in itertools.product(
        [0.0, 3.0], [None, sinks], [True, False], [True, False]
    ):
        ours = op(q, k, v, mask, 0.2, causal, softcap, sink, safe)
        exact = attention_f64(q, k, v, mask, 0.2, causal, softcap, sink, safe)
        assert torch.allclose(ours, exact, atol=1e-6, equal_nan=True)


def test_left_padding():
    q, k, v = qkv(B=3, T=4, S=64)
    mask = torch.ones(4, 64, dtype=torch.bool).tril(60).repeat(3, 1, 1, 1)
    for b, pad in enumerate([0, 1, 63]):
        mask[b, ..., :pad] = False
    check_attention(q, k, v, mask)


@pytest.mark.parametrize("T", [1, 5, 100])
def test_a_static_cache_is_read_no_further_than_its_mask(T):
    """Eager multiplies what is masked by zero, so NaN there would show; a tile that is closed is not read, so
    here it does not. Finite leftovers of an earlier use change nothing in either."""
    q, k, v = qkv(T=T, S=2048)
    mask = torch.zeros(1, 1, T, 2048, dtype=torch.bool)
    mask[..., :T] = torch.ones(T, T, dtype=torch.bool).tril()
    mask[..., : 128 - T] |= T < 64
    exact = check_attention(q, k, v, mask)
    k[:, :, 128:], v[:, :, 128:] = float("nan"), float("nan")
    op = kernels.lookup("attention", dtype=BF16, head_dim=64)
    for one in (mask, torch.where(mask, 0.0, -INF), torch.where(mask, 0.0, torch.finfo(F32).min)):
        assert torch.equal(op(q, k, v, one, 0.125), exact)
    if T <= 16:
        assert load.ops().sits_tiles_read() == 2 * 2  # kv heads, tiles of 64 keys
    k[:, :, 128:], v[:, :, 128:] = 3e38, -3e38
    assert torch.equal(op(q, k, v, mask, 0.125), exact)


def test_narrowing_without_a_kernel():
    q, k, v = (t.double() for t in qkv(T=20, S=500))
    for first, last in [(0, 20), (100, 110), (499, 500), (0, 500), (7, 7)]:
        keep = torch.zeros(20, 500, dtype=torch.bool)
        keep[:, first:last] = True
        for mask in (keep, torch.where(keep, 0.0, -INF).double(), torch.where(keep, 0.0, -3.4e38)):
            mask = mask if mask.dtype != torch.float32 else mask.double()
            want = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, scale=0.3)
            ours = torch.ops.sits_cpp.attention(q, k, v, mask, 0.3)
            assert torch.allclose(ours, want, atol=1e-12)


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = qkv()
    op = torch.ops.sits_cpp.attention
    for bad in [(q[0], k, v), (q[:, :5], k, v), (q, k[:, :, :9], v), (q, k[..., :9], v)]:
        with pytest.raises(RuntimeError, match="sits_cpp::attention"):
            op(*bad, None, 0.1)
    with pytest.raises(RuntimeError, match="broadcast"):
        op(q, k, v, torch.ones(1, 1, 2, 65, dtype=torch.bool), 0.1)
