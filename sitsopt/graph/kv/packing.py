"""Tiles of 64 keys and values as integers: keys per channel, values per token, 4 bits by halves or 8 bits.

A byte of int4 holds channels i (low four bits) and i + D/2, as everywhere in this project; value = scale * q + low.
int8 has a scale only. Scales and lows are f16 and are rounded before they are used, so that packing
what was unpacked gives the same bytes.
"""

from __future__ import annotations

import torch

LARGEST, SMALLEST = 65504.0, 6e-8  # of f16


def pack(x: torch.Tensor, bits: int, per: int) -> tuple[torch.Tensor, ...]:
    """x [..., 64, D] as (integers, scale[, low]). per: the dim that shares a scale, -2 for a channel's tokens, -1 for a
    token's channels."""
    wide = x.float()
    if bits == 8:
        scale = (wide.abs().amax(per) / 127).clamp(SMALLEST, LARGEST).half()
        q = torch.round(wide / scale.float().unsqueeze(per)).clamp(-127, 127)
        return q.to(torch.int8), scale
    least = wide.amin(per)
    low = torch.where(least.abs() < LARGEST, least, 0.0).half()
    scale = ((wide.amax(per) - low.float()) / 15).clamp(SMALLEST, LARGEST).half()
    q = torch.round((wide - low.float().unsqueeze(per)) / scale.float().unsqueeze(per))
    first, second = q.clamp(0, 15).to(torch.uint8).chunk(2, -1)
    return first | (second << 4), scale, low


def unpack(parts: tuple[torch.Tensor, ...], per: int) -> torch.Tensor:
    """The f32 values that `pack`'s result stands for."""
    q, scale = parts[0], parts[1].float().unsqueeze(per)
    if len(parts) == 2:
        return q.float() * scale
    nibbles = torch.cat([q & 15, q >> 4], -1)
    return nibbles.float() * scale + parts[2].float().unsqueeze(per)
