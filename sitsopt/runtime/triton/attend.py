"""Attention from tensors: the arguments and the grid of its kernels, whoever runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sitsopt.emit.attention import TILE, FlashAttention, Merge
from sitsopt.emit.triton import attention, attention_merge
from sitsopt.emit.triton.source import Source

from .runner import Run


@dataclass
class Cache:
    """Keys and values as the kernel reads them.

    Floats: k, v [B, Hk, S, D]. int8: with k_scale [B, Hk, S / TILE, D] and v_scale [B, Hk, S], f16. int4: two
    channels a byte (i and i + D/2), value = scale * nibble + low. Paged: [pages, Hk, page, D] and a table
    [B, pages of a sequence]; the scales are paged alike.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_low: torch.Tensor | None = None
    v_low: torch.Tensor | None = None
    table: torch.Tensor | None = None


@dataclass
class Extras:
    """What stands between scores and softmax, as the kernel description says it is there."""

    scale: float = 1.0
    softcap: float = 0.0
    diagonal: int = 0
    window: int = 0
    mask: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    first: torch.Tensor | None = None
    last: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass
class Parts:
    """Partial results of a split attention, joined by `merge`; several kernels may fill one."""

    part: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor


def empty_parts(q: torch.Tensor, kv_heads: int, value_dim: int, slots: int) -> Parts:
    """Room for the parts of one attention."""
    batch, heads, tokens, _ = q.shape
    shape = (batch * kv_heads, slots, tokens * (heads // kv_heads))
    part = q.new_empty((*shape, value_dim), dtype=torch.float32)
    top, total = (q.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return Parts(part, top, total)


def attend(
    run: Run,
    kernel: FlashAttention,
    q: torch.Tensor,
    cache: Cache,
    keys: int,
    extras: Extras,
    *,
    splits: int = 1,
    slot: int = 0,
    parts: Parts | None = None,
    out: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    source: Source | None = None,
) -> None:
    """Runs the kernel; writes `parts` from `slot` on when it splits, else `out`."""
    source = source or attention.source(kernel)
    batch, heads, tokens, _ = q.shape
    kv_heads = heads // kernel.group
    args: list[Any] = [q, cache.k, cache.v]
    args += [cache.k_scale, cache.v_scale] if kernel.cache else []
    args += [cache.k_low, cache.v_low] if kernel.cache == "i4" else []
    if kernel.splits:
        assert parts is not None
        args += [parts.part, parts.top, parts.total]
    else:
        args += [out]
    args += [mass] if kernel.mass else []
    args += [cache.table] if kernel.page else []
    args += [extras.mask] if kernel.mask else []
    args += [extras.slopes] if kernel.alibi else []
    args += [extras.first, extras.last] if kernel.bounds else []
    args += [extras.sinks] if kernel.sinks and not kernel.splits else []
    args += [extras.scale] + [extras.softcap] * kernel.softcap
    args += [tokens, keys, kv_heads, extras.diagonal] + [extras.window] * kernel.window
    if kernel.splits:
        assert parts is not None
        args += [slot, parts.part.shape[1]]
    args += _strides(kernel, q, cache, extras, out)
    blocks = -(-tokens * kernel.group // source.constant("ROWS"))
    run(source, (blocks, splits if kernel.splits else 1, batch * kv_heads), args)


def _strides(
    kernel: FlashAttention, q: torch.Tensor, cache: Cache, extras: Extras, out: torch.Tensor | None
) -> list[int]:
    strides = [t.stride(d) for t in (q, cache.k, cache.v) for d in range(3)]
    if not kernel.splits:
        assert out is not None
        strides += [out.stride(d) for d in range(3)]
    if kernel.cache:
        assert cache.k_scale is not None and cache.v_scale is not None
        strides += [cache.k_scale.stride(d) for d in range(3)]
        strides += [cache.v_scale.stride(d) for d in range(2)]
    if kernel.page:
        assert cache.table is not None
        strides += [cache.table.stride(0)]
    if kernel.mask:
        assert extras.mask is not None
        strides += list(extras.mask.expand(*q.shape[:3], extras.mask.shape[-1]).stride())
    return strides


def merge(
    run: Run,
    kernel: Merge,
    parts: Parts,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    source: Source | None = None,
) -> torch.Tensor:
    """Writes `out` [B, Hq, T, Dv] from the parts; returns the log-sum-exp of every row, heads fastest."""
    source = source or attention_merge.source(kernel)
    pairs, slots, rows = parts.top.shape
    lse = out.new_empty((pairs * rows,), dtype=torch.float32)
    kv_heads = out.shape[1] // kernel.group
    args: list[Any] = [parts.part, parts.top, parts.total, out, lse]
    args += [sinks] if kernel.sinks else []
    args += [out.shape[2], kv_heads, slots, *(out.stride(d) for d in range(3))]
    run(source, (pairs * rows,), args)
    return lse


def pick_splits(pairs: int, keys: int, units: int) -> int:
    """How many programs share a sequence: two a unit in all, no fewer than four tiles each."""
    most = max(1, keys // (4 * TILE))
    return max(1, min(most, -(-2 * units // max(pairs, 1)), 128))


def quantize_cache(k: torch.Tensor, v: torch.Tensor, kind: str) -> Cache:
    """Plain PyTorch: K per channel over tiles of 64 keys, V per token. The length is padded to whole tiles."""
    short = -k.shape[2] % TILE
    k, v = (torch.nn.functional.pad(x.float(), (0, 0, 0, short)) for x in (k, v))
    tiles = k.unflatten(2, (-1, TILE))
    if kind == "i8":
        k_scale = (tiles.abs().amax(3) / 127).clamp(min=6e-8).half()
        v_scale = (v.abs().amax(-1) / 127).clamp(min=6e-8).half()
        kq = torch.round(tiles / k_scale.float().unsqueeze(3)).clamp(-127, 127).flatten(2, 3)
        vq = torch.round(v / v_scale.float().unsqueeze(-1)).clamp(-127, 127)
        return Cache(kq.to(torch.int8), vq.to(torch.int8), k_scale, v_scale)
    k_low, v_low = tiles.amin(3).half(), v.amin(-1).half()
    k_scale = ((tiles.amax(3) - k_low.float()) / 15).clamp(min=6e-8).half()
    v_scale = ((v.amax(-1) - v_low.float()) / 15).clamp(min=6e-8).half()
    kq = torch.round((tiles - k_low.float().unsqueeze(3)) / k_scale.float().unsqueeze(3)).flatten(
        2, 3
    )
    vq = torch.round((v - v_low.float().unsqueeze(-1)) / v_scale.float().unsqueeze(-1))
    packed = [_pack(x.clamp(0, 15).to(torch.uint8)) for x in (kq, vq)]
    return Cache(packed[0], packed[1], k_scale, v_scale, k_low, v_low)


def _pack(nibbles: torch.Tensor) -> torch.Tensor:
    low, high = nibbles.chunk(2, -1)
    return low | (high << 4)


def dequantize_cache(cache: Cache, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The f64 keys and values that a quantized cache stands for."""
    assert cache.k_scale is not None and cache.v_scale is not None
    k, v = cache.k, cache.v
    if kind == "i4":
        k, v = (torch.cat([x & 15, x >> 4], -1) for x in (k, v))
    k = k.double() * cache.k_scale.double().repeat_interleave(TILE, 2)
    v = v.double() * cache.v_scale.double().unsqueeze(-1)
    if cache.k_low is not None and cache.v_low is not None:
        k = k + cache.k_low.double().repeat_interleave(TILE, 2)
        v = v + cache.v_low.double().unsqueeze(-1)
    return k, v
