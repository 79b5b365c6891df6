"""Cache writes in the interpreter: what attention then reads is what eager code would have kept."""

from __future__ import annotations

import pytest
import torch

from sitsopt.emit.cache import Append, Commit
from sitsopt.emit.triton import cache_append, cache_commit
from sitsopt.runtime.triton.attend import quantize_cache
from tests.triton.harness import DTYPES, close, launch
from tests.triton.test_rope import reference


@pytest.mark.parametrize(
    "dtype, head_dim, value_dim", [("f16", 64, 64), ("bf16", 80, 48), ("f32", 2, 3)]
)
@pytest.mark.parametrize("page", [0, 8])
def test_append(dtype: str, head_dim: int, value_dim: int, page: int) -> None:
    kind, batch, heads, kv_heads, tokens = DTYPES[dtype], 2, 3, 2, 3
    q = torch.randn(batch, tokens, heads, head_dim).to(kind).transpose(1, 2)
    k = torch.randn(batch, tokens, kv_heads, head_dim).to(kind).transpose(1, 2)
    v = torch.randn(batch, tokens, kv_heads, value_dim).to(kind).transpose(1, 2)
    cos, sin = torch.randn(1, tokens, head_dim).to(kind), torch.randn(1, tokens, head_dim).to(kind)
    positions = torch.tensor([[9, 10, 11], [0, 7, 15]])
    shape = (4, kv_heads, page) if page else (batch, kv_heads, 16)
    kc, vc = (
        torch.full((*shape, head_dim), 77.0).to(kind),
        torch.full((*shape, value_dim), 77.0).to(kind),
    )
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    out = torch.full_like(q, 77.0)
    source = cache_append.source(Append(dtype, head_dim, value_dim, page=page))
    rows = batch * tokens * (heads + kv_heads)
    strides = [t.stride(d) for t in (q, k, v, out, kc, vc) for d in range(3)]
    launch(
        source, (-(-rows // source.constant("ROWS")),), q, k, v, cos, sin, out, kc, vc, positions,
        *[table] * bool(page), rows, tokens, heads, kv_heads, *strides, 0, cos.stride(1), 3, *[2] * bool(page),
    )  # fmt: skip

    def near(got, want):
        close(torch.where((got.double() - want).abs() < 3e-6, want, got.double()), want, dtype)

    near(out, reference(q, cos, sin, "half"))
    if page:
        kc, vc = (c[table.long()].transpose(1, 2).flatten(2, 3) for c in (kc, vc))
    turned = reference(k, cos, sin, "half")
    for b in range(batch):
        near(kc[b, :, positions[b]], turned[b])
        assert torch.equal(vc[b, :, positions[b]], v[b])
        others = [i for i in range(16) if i not in positions[b].tolist()]
        assert (kc[b, :, others] == 77).all() and (vc[b, :, others] == 77).all()


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("cache", ["i8", "i4"])
@pytest.mark.parametrize(
    "dtype, head_dim, tokens", [("f32", 64, 128), ("bf16", 80, 64), ("f16", 64, 100)]
)
def test_commit(dtype: str, head_dim: int, tokens: int, cache: str, rope: bool) -> None:
    kind = DTYPES[dtype]
    k, v = (torch.randn(2, 2, tokens, head_dim).to(kind) for _ in range(2))
    k[0, 0, 3, 5], v[0, 1, 2] = 40.0, 1.0
    cos, sin = (torch.randn(1, tokens, head_dim).to(kind) for _ in range(2))
    turned = reference(k, cos, sin, "half").to(kind) if rope else k
    want = quantize_cache(turned[:, :, : tokens // 64 * 64], v[:, :, : tokens // 64 * 64], cache)
    padded = quantize_cache(turned, v, cache)
    made = {
        name: torch.full_like(getattr(padded, name), 7)
        for name in ("k", "v", "k_scale", "v_scale", "k_low", "v_low")
        if getattr(padded, name) is not None
    }
    source = cache_commit.source(Commit(dtype, head_dim, head_dim, cache, rope))
    lows = [made["k_low"], made["v_low"]] if cache == "i4" else []
    strides = [t.stride(d) for t in (k, v, made["k"], made["v"]) for d in range(3)]
    launch(
        source, (-(-tokens // 64), 2, 2), k, v, *[cos, sin] * rope, made["k"], made["v"],
        made["k_scale"], made["v_scale"], *lows, tokens, 0, *strides,
        *made["k_scale"].stride()[:3], *made["v_scale"].stride()[:2], *[0, cos.stride(1)] * rope,
    )  # fmt: skip
    whole = tokens // 64
    for name in made:
        length = whole if name.startswith("k_") else whole * 64
        got, right = made[name][:, :, :length], getattr(want, name)
        if got.dtype == torch.float16:
            torch.testing.assert_close(got, right, rtol=2e-3, atol=2e-3 if rope else 1e-6)
        else:
            # A value halfway between two steps may fall to either side.
            assert (got == right).double().mean() > (0.97 if rope else 0.999)
    scale = made["v_scale"][0, 0, tokens - 1].float()
    back = made["v"][0, 0, tokens - 1]
    if cache == "i4":
        back = torch.cat([back & 15, back >> 4]) * scale + made["v_low"][0, 0, tokens - 1].float()
    else:
        back = back * scale
    assert (back - v[0, 0, tokens - 1].float()).abs().max() <= scale * 0.51 + 2e-3
