"""References in f64 and the bound that every kernel is held to."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sitsopt.runtime import kernels

INF = float("inf")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
UNIT = {F32: 2.0**-24, BF16: 2.0**-9, F16: 2.0**-12}  # half a unit in the last place, relative

needs_kernels = pytest.mark.skipif(
    not kernels.availability()[0], reason=f"no kernels here: {kernels.availability()[1]}"
)


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    """Normal numbers that depend on shape and seed alone."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def attention_f64(q, k, v, *rest):
    """Attention in f64, whatever the inputs."""
    return attention_spelled(q.double(), k.double(), v.double(), *rest)


def attention_spelled(q, k, v, mask, scale, causal=False, softcap=0.0, sinks=None, safe=True):
    """Attention spelled out, in the dtype of q [B, Hq, T, D]; k and v [B, Hk, S, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -INF)
    if mask is not None:
        s = s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else s + mask.to(s.dtype)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    p = torch.softmax(s, -1)
    if safe and s.shape[-1]:
        p = p.masked_fill((s == -INF).all(-1, keepdim=True), 0.0)
    return (p if sinks is None else p[..., :-1]) @ v


def assert_close(ours, exact, eager, slack: float = 0.0, largest: float | None = None) -> None:
    """No further from the exact result than twice eager's own error, or the rounding of the largest value (what
    was added up, where that cancels)."""
    exact = exact.masked_fill(exact.to(ours.dtype).isinf(), INF).copysign(exact)
    assert ours.shape == exact.shape and ours.dtype == eager.dtype
    assert torch.equal(ours.isnan(), exact.isnan()), "NaN in other places than the exact result"
    finite = exact.isfinite()
    assert torch.equal(ours[~finite].double().nan_to_num(7.0), exact[~finite].nan_to_num(7.0))
    if not finite.any():
        return
    error = (ours.double() - exact)[finite].abs().max().item()
    other = (eager.double() - exact)[finite & eager.isfinite()].abs()
    largest = max(largest or 0.0, exact[finite].abs().max().item())
    bound = max(
        2 * other.max().item() if other.numel() else 0.0, (4 * UNIT[ours.dtype] + slack) * largest
    )
    assert error <= bound + 1e-37, (
        f"error {error:.3g} over {bound:.3g} (largest value {largest:.3g})"
    )


def check_attention(
    q, k, v, mask=None, scale=None, causal=False, softcap=0.0, sinks=None, safe=True
):
    """Runs the op, compares it with f64, and returns it."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    op = kernels.lookup("attention", dtype=q.dtype, head_dim=q.shape[-1], value_dim=v.shape[-1])
    ours = op(q, k, v, mask, scale, causal, softcap, sinks, safe)
    exact = attention_f64(q, k, v, mask, scale, causal, softcap, sinks, safe)
    if softcap == 0.0 and sinks is None and safe:
        eager = F.scaled_dot_product_attention(
            q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        eager = attention_spelled(q, k, v, mask, scale, causal, softcap, sinks, safe)
    assert_close(ours, exact, eager, slack=1.2e-6 if q.dtype == F32 else 2 * UNIT[q.dtype])
    return ours
