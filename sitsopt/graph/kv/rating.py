"""Which old tiles stay in full: those that queries looked at most while they could see them.

The mass of a tile is the sum of the attention weights its tokens got, divided by the number of queries that could see
it (older tokens are seen by more; ZipCache, He et al., 2024). A sequence's sinks do not count: they are kept anyway.
Decided once, when a tile leaves the window.
"""

from __future__ import annotations

import math

import torch

from .layout import TILE
from .state import PROMOTED, START, USED, Fresh, State

SAMPLES = 64  # query positions of one call that are looked at, evenly spaced
OPEN = -1e30  # additive masks below this close a key


def sampled(rows: int, device: torch.device) -> torch.Tensor:
    """The query positions that are looked at, the last always."""
    count = min(rows, SAMPLES)
    return (torch.arange(1, count + 1, device=device) * rows).div(count, rounding_mode="floor") - 1


def open_keys(mask: torch.Tensor) -> torch.Tensor:
    """[B or 1, T, S] bool: which keys a query may attend, by any head."""
    seen = mask if mask.dtype == torch.bool else mask > OPEN
    return (
        seen.any(1) if seen.dim() == 4 else seen.reshape(-1, *seen.shape[-2:]).any(0, keepdim=True)
    )


def set_start(state: State, seen: torch.Tensor) -> None:
    """Note where each sequence begins: at the first key that the last query may attend."""
    last = seen[:, -1].expand(state.meta.shape[0], -1)
    state.meta[:, START] = last.to(torch.int8).argmax(-1)


def observe(state: State, weights: torch.Tensor, seen: torch.Tensor) -> None:
    """Add up attention. weights: f32 [B, Hk, S], summed over the queries that were looked at and the heads of a
    group; seen: bool [B or 1, T, S], what those queries could attend."""
    batch = state.meta.shape[0]
    first = state.meta[:, START].unsqueeze(1)
    place = torch.arange(weights.shape[-1], device=weights.device)
    sink = (place >= first) & (place < first + state.layout.sinks)
    weights = weights.masked_fill(sink.unsqueeze(1), 0.0)
    short = state.layout.tiles * TILE - weights.shape[-1]
    tiles = torch.nn.functional.pad(weights, (0, short)).unflatten(-1, (-1, TILE)).sum(-1)
    state.parts["mass"].add_(tiles)
    visible = torch.nn.functional.pad(seen, (0, short)).unflatten(-1, (-1, TILE)).any(-1)
    state.parts["seen"].add_(visible.sum(1).expand(batch, -1).float())


def rates(state: State, count: int) -> torch.Tensor:
    """[B, Hk, count]: mass by query that could see the tile, to 12 bits: in whatever order a sum is taken, tiles that got
    the same (all of it, while there is only one) stay equal."""
    seen = state.parts["seen"][:, None, :count].clamp(min=1)
    mantissa, exponent = torch.frexp(state.parts["mass"][:, :, :count] / seen)
    return torch.ldexp((mantissa * 4096).round() / 4096, exponent)


def percentile(values: torch.Tensor, share: float = 0.99) -> torch.Tensor:
    """The nearest-rank percentile of the last dim."""
    ranked = values.sort(-1).values
    return ranked[..., math.ceil(share * values.shape[-1]) - 1]


def promote(state: State, fresh: Fresh) -> None:
    """Put the hottest of the tiles that were just packed into the pool."""
    layout, old, now = state.layout, fresh.old, fresh.now
    if now == old or not layout.budget:
        return
    rate = rates(state, now)
    limit = layout.threshold * percentile(rate.flatten(1))
    room = min(layout.pool(state.shape.kv_heads), math.ceil(layout.budget * now * rate.shape[1]))
    for row in range(rate.shape[0]):
        mine = rate[row, :, old:now].flatten()
        hot = mine.argsort(descending=True, stable=True)
        hot = hot[(mine[hot] >= limit[row]) & (mine[hot] > 0)]
        used = int(state.meta[row, USED])
        for place in hot[: max(0, room - used)].tolist():
            head, tile = place // (now - old), old + place % (now - old)
            for name, tokens in (("k", fresh.k), ("v", fresh.v)):
                part, first = state.parts[f"pool_{name}"], (tile - old) * TILE
                part[row, used] = tokens[row, head, first : first + TILE].to(part.dtype)
            used += 1
            state.parts["hot"][row, head, tile] = used
        state.meta[row, PROMOTED] += used - state.meta[row, USED]
        state.meta[row, USED] = used
