"""Attention kernels in the interpreter against f64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sitsopt.emit.attention import FlashAttention, Merge
from sitsopt.emit.triton import attention
from sitsopt.runtime.triton.attend import (
    Cache,
    Extras,
    attend,
    dequantize_cache,
    empty_parts,
    merge,
    quantize_cache,
)
from sitsopt.runtime.triton.interpreter import interpret
from tests.triton.harness import DTYPES

SLACK = {"f32": 1e-5, "f16": 3e-3, "bf16": 2e-2}


def reference(kernel: FlashAttention, q, k, v, keys: int, extras: Extras):
    """The same in f64, every score in memory."""
    q, k, v = (x.double() for x in (q, k[:, :, :keys], v[:, :, :keys]))
    k, v = (x.repeat_interleave(kernel.group, 1) for x in (k, v))
    score = q @ k.transpose(-1, -2) * extras.scale
    if kernel.softcap:
        score = torch.tanh(score / extras.softcap) * extras.softcap
    at = torch.arange(q.shape[2])[:, None] + extras.diagonal
    key = torch.arange(keys)[None, :]
    if kernel.alibi:
        score = score + extras.slopes.double()[:, None, None] * (key - at)
    seen = torch.ones_like(score, dtype=torch.bool)
    if kernel.causal:
        seen &= key <= at
    if kernel.window:
        seen &= key > at - extras.window
    if kernel.bounds:
        seen &= (key >= extras.first[:, None, None, None]) & (
            key < extras.last[:, None, None, None]
        )
    if kernel.mask == "i1":
        seen &= extras.mask
    elif kernel.mask:
        score = score + extras.mask.double()
    score = score.masked_fill(~seen, float("-inf"))
    if kernel.sinks:
        sink = extras.sinks.double()[None, :, None, None].expand(*score.shape[:3], 1)
        weight = torch.softmax(torch.cat([score, sink], -1), -1)[..., :-1]
    else:
        weight = torch.softmax(score, -1)
    if kernel.empty == "zero":
        weight = torch.where((score == float("-inf")).all(-1, keepdim=True), 0.0, weight)
    return weight @ v, score


def run(kernel, q, cache, keys, extras, splits: int = 2, poison: float = 77.0):
    batch, heads, tokens, _ = q.shape
    out = torch.full((batch, tokens, heads, kernel.value_dim), poison).to(q.dtype).transpose(1, 2)
    tiles = -(-keys // 64)
    mass = torch.full((batch, heads // kernel.group, tokens, kernel.group, tiles), poison)
    small = attention.source(kernel)
    if not kernel.splits:
        small = small.tuned({"ROWS": 16, "TILE": 64 if kernel.cache else 16}, 4, 1)
    parts = empty_parts(q, heads // kernel.group, kernel.value_dim, splits)
    for tensor in (parts.part, parts.top, parts.total):
        tensor.fill_(poison)
    attend(interpret, kernel, q, cache, keys, extras, splits=splits, parts=parts, out=out, mass=mass, source=small)  # fmt: skip
    lse = None
    if kernel.splits:
        joined = Merge(kernel.dtype, kernel.value_dim, kernel.group, kernel.sinks, kernel.empty)
        lse = merge(interpret, joined, parts, out, extras.sinks)
    return out, lse, mass


def check(out, want, dtype: str) -> None:
    assert torch.equal(out.isnan(), want.isnan())
    fine = ~want.isnan()
    error = (out.double() - want)[fine].abs()
    assert error.numel() == 0 or error.max() <= SLACK[dtype] * max(1.0, want[fine].abs().max()), (
        error.max()
    )


def tensors(kernel: FlashAttention, batch=1, kv_heads=2, tokens=1, keys=100, seed=0):
    draw = torch.Generator().manual_seed(seed)
    kind = DTYPES[kernel.dtype]
    q = torch.randn(batch, tokens, kv_heads * kernel.group, kernel.head_dim, generator=draw).to(
        kind
    )
    k = torch.randn(batch, kv_heads, keys, kernel.head_dim, generator=draw).to(kind)
    v = torch.randn(batch, kv_heads, keys, kernel.value_dim, generator=draw).to(kind)
    return q.transpose(1, 2), k, v


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": True},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True, "causal": True},
    "sinks": {"sinks": True},
    "bounds": {"bounds": True},
    "bool mask": {"mask": "i1"},
    "additive mask": {"mask": "f32"},
    "everything": {
        "causal": True, "window": True, "softcap": True, "alibi": True, "sinks": True,
        "bounds": True, "mask": "f16",
    },
}  # fmt: skip


def extras_for(kernel: FlashAttention, batch: int, heads: int, tokens: int, keys: int) -> Extras:
    draw = torch.Generator().manual_seed(5)
    mask = None
    if kernel.mask == "i1":
        mask = torch.rand(batch, 1, tokens, keys, generator=draw) > 0.4
        mask[0, 0, 0] = False
    elif kernel.mask:
        mask = torch.randn(1, heads, tokens, keys, generator=draw).to(DTYPES[kernel.mask])
        mask[0, 0, 0] = float("-inf")
        mask[0, 1, 0, : keys // 2] = float("-inf")
    return Extras(
        scale=kernel.head_dim**-0.5, softcap=5.0, diagonal=keys - tokens, window=40, mask=mask,
        slopes=torch.rand(heads, generator=draw) * 0.1,
        first=torch.tensor([3] * batch, dtype=torch.int32),
        last=torch.tensor([keys - 2, 3][:batch], dtype=torch.int32),
        sinks=torch.randn(heads, generator=draw),
    )  # fmt: skip


@pytest.mark.parametrize("splits", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, splits: bool) -> None:
    kernel = FlashAttention("f32", 32, 16, 3, splits=splits, **CASES[case])
    tokens, keys = 2 if splits else 5, 70
    batch = 2 if case in ("plain", "bounds", "everything") else 1
    q, k, v = tensors(kernel, batch, tokens=tokens, keys=keys)
    extras = extras_for(kernel, batch, 6, tokens, keys)
    want, _ = reference(kernel, q, k, v, keys, extras)
    out, _, _ = run(kernel, q, Cache(k, v), keys, extras)
    check(out, want, "f32")


@pytest.mark.parametrize(
    "dtype, head_dim, group",
    [("f16", 64, 1), ("bf16", 64, 3), ("f16", 80, 3), ("bf16", 128, 8), ("f16", 256, 17)],
)
def test_decode(dtype: str, head_dim: int, group: int) -> None:
    kernel = FlashAttention(dtype, head_dim, head_dim, group, splits=True)
    q, k, v = tensors(kernel, keys=131)
    extras = Extras(scale=head_dim**-0.5)
    want, _ = reference(kernel, q, k, v, 131, extras)
    check(run(kernel, q, Cache(k, v), 131, extras)[0], want, dtype)


@pytest.mark.parametrize("keys, splits", [(1, 1), (16, 2), (17, 1), (64, 17), (65, 2), (65, 1)])
def test_lengths_and_splits(keys: int, splits: int) -> None:
    kernel = FlashAttention("f16", 64, 64, 2, splits=True)
    q, k, v = tensors(kernel, keys=80)
    k[:, :, keys:], v[:, :, keys:] = float("nan"), float("nan")  # a cache's unwritten end
    extras = Extras(scale=0.1)
    want, _ = reference(kernel, q, k, v, keys, extras)
    check(run(kernel, q, Cache(k, v), keys, extras, splits)[0], want, "f16")


@pytest.mark.parametrize("splits", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("cache", ["i8", "i4"])
@pytest.mark.parametrize("dtype, head_dim", [("f16", 64), ("bf16", 128), ("f16", 96)])
def test_quantized_cache(cache: str, dtype: str, head_dim: int, splits: bool) -> None:
    kernel = FlashAttention(dtype, head_dim, head_dim, 4, cache=cache, splits=splits, causal=True)
    q, k, v = tensors(kernel, tokens=3, keys=150)
    k[:, :, 5, 7] *= 20
    kept = quantize_cache(k, v, cache)
    extras = Extras(scale=head_dim**-0.5, diagonal=147)
    want, _ = reference(kernel, q, *dequantize_cache(kept, cache), 150, extras)
    out, _, _ = run(kernel, q, kept, 150, extras)
    check(out, want, dtype)


@pytest.mark.parametrize("cache", ["", "i8", "i4"])
def test_pages(cache: str) -> None:
    page = 64 if cache else 16
    kernel = FlashAttention("f16", 64, 64, 2, cache=cache, page=page, splits=True)
    plain = replace(kernel, page=0)
    q, k, v = tensors(kernel, 2, 1, keys=256)
    kept = quantize_cache(k, v, cache) if cache else Cache(k, v)
    count = 256 // page
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    table = order.view(2, count)

    def paged(x, size):
        if x is None:
            return None
        pages = x.unflatten(2, (count, size)).transpose(1, 2).flatten(0, 1)
        return pages[order.argsort()].contiguous()

    step = page // 64 if cache else 0
    moved = Cache(
        paged(kept.k, page), paged(kept.v, page), paged(kept.k_scale, step), paged(kept.v_scale, page),
        paged(kept.k_low, step), paged(kept.v_low, page), table,
    )  # fmt: skip
    extras = Extras(scale=0.125)
    want, _, _ = run(plain, q, kept, 200, extras)
    out, _, _ = run(kernel, q, moved, 200, extras)
    assert torch.equal(out, want)


def test_mass_of_tiles_and_lse() -> None:
    kernel = FlashAttention("f16", 64, 64, 2, splits=True, mass=True)
    q, k, v = tensors(kernel, tokens=2, keys=150)
    extras = Extras(scale=0.125)
    _, score = reference(kernel, q, k, v, 150, extras)
    _, lse, mass = run(kernel, q, Cache(k, v), 150, extras)
    # [B, Hk, T, G]: heads fastest
    want = torch.logsumexp(score, -1).unflatten(1, (2, 2)).transpose(2, 3)
    torch.testing.assert_close(lse.view(1, 2, 2, 2).double(), want, atol=1e-3, rtol=0)
    tiles = (
        torch.nn.functional.pad(torch.softmax(score, -1), (0, 42)).unflatten(-1, (3, 64)).sum(-1)
    )
    got = torch.exp(mass - lse.view(1, 2, 2, 2, 1))
    want = tiles.unflatten(1, (2, 2)).transpose(2, 3)
    torch.testing.assert_close(got.double(), want, atol=1e-3, rtol=0)


@pytest.mark.parametrize("empty", ["zero", "nan"])
@pytest.mark.parametrize("splits", [True, False], ids=["decode", "prefill"])
def test_rows_that_attend_nothing(empty: str, splits: bool) -> None:
    kernel = FlashAttention("f32", 32, 32, 2, mask="i1", splits=splits, empty=empty)
    q, k, v = tensors(kernel, tokens=3, keys=70)
    mask = torch.ones(1, 1, 3, 70, dtype=torch.bool)
    mask[0, 0, 1] = False
    extras = Extras(scale=0.2, mask=mask)
    want, _ = reference(kernel, q, k, v, 70, extras)
    check(run(kernel, q, Cache(k, v), 70, extras)[0], want, "f32")


def test_a_very_low_mask_everywhere_is_the_mean() -> None:
    kernel = FlashAttention("f32", 32, 32, 2, mask="f32", splits=True)
    q, k, v = tensors(kernel, keys=70)
    extras = Extras(scale=0.2, mask=torch.full((1, 1, 1, 70), torch.finfo(torch.float32).min))
    out, _, _ = run(kernel, q, Cache(k, v), 70, extras)
    torch.testing.assert_close(
        out, v.repeat_interleave(2, 1).mean(2, keepdim=True), atol=1e-6, rtol=0
    )


def test_nan_stays_with_its_head() -> None:
    kernel = FlashAttention("f16", 64, 64, 2, splits=True)
    q, k, v = tensors(kernel, keys=70)
    k[0, 1, 3, 0] = float("nan")
    out, _, _ = run(kernel, q, Cache(k, v), 70, Extras(scale=0.1))
    assert out[0, 2:].isnan().all() and out[0, :2].isfinite().all()


def test_parts_of_two_caches() -> None:
    """The old keys in int4, the newest in f16: two kernels, one merge."""
    old = FlashAttention("f16", 64, 64, 2, cache="i4", splits=True)
    new = FlashAttention("f16", 64, 64, 2, splits=True)
    q, k, v = tensors(new, keys=200)
    kept = quantize_cache(k[:, :, :128], v[:, :, :128], "i4")
    parts = empty_parts(q, 2, 64, 3)
    extras = Extras(scale=0.125)
    attend(interpret, old, q, kept, 128, extras, splits=2, parts=parts)
    tail = Cache(k[:, :, 128:], v[:, :, 128:])
    attend(interpret, new, q, tail, 72, extras, splits=1, slot=2, parts=parts)
    out = torch.full((1, 4, 1, 64), 77.0).half()
    merge(interpret, Merge("f16", 64, 2), parts, out)
    both = [
        torch.cat([a, b.double()], 2)
        for a, b in zip(dequantize_cache(kept, "i4"), (tail.k, tail.v), strict=True)
    ]
    check(out, reference(new, q, *both, 200, extras)[0], "f16")
