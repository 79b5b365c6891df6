"""What a layer's cache holds: bytes by tier, and which tile is kept how."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layout import TILE
from .rating import rates
from .state import PROMOTED, START, State

HOTTEST = 5  # tiles that are named
PACKED, RECENT, HOT, SINKS, EMPTY = "prhs."  # marks of a tile in `Tiers.map`


@dataclass(frozen=True)
class Tiers:
    """One layer with `tokens` a sequence, over all its sequences.

    in_use: bytes by tier (`packed` integers with their scales, `hot`, `recent`, `sinks`, `notes` on what was attended).
    allocated: bytes of it all; full: of the same tokens in the model's dtype. bits: a value's, on average. promoted:
    tiles of a head that were ever kept in full; demoted: that went to integers. hottest: (sequence, head, tile, attention
    of a query, summed over the heads of its group). map: a mark a tile of the first sequence; hot: the share of heads that keep it in full.
    """

    tokens: int
    in_use: dict[str, int]
    allocated: int
    full: int
    bits: float
    promoted: int
    demoted: int
    hottest: list[tuple[int, int, int, float]]
    map: str
    hot: list[float]


def tiers(state: State, length: int) -> Tiers:
    """Of a cache with `length` tokens in it."""
    shape, layout, parts = state.shape, state.layout, state.parts
    batch, old = state.arena.shape[0], state.committed
    size = parts["ring_k"].dtype.itemsize
    token = shape.kv_heads * (shape.head_dim + shape.value_dim) * size
    used = int((parts["hot"] > 0).sum())
    kept = min(length - old * TILE, layout.ring)
    sinks = min(layout.sinks, old * TILE)
    in_use = {
        "packed": batch * old * _tile_bytes(state),
        "hot": used * TILE * token // shape.kv_heads,
        "recent": batch * kept * token,
        "sinks": batch * sinks * token,
        "notes": batch * sum(_row(parts[name]) for name in ("meta", "hot", "mass", "seen")),
    }
    values = batch * length * shape.kv_heads * (shape.head_dim + shape.value_dim)
    return Tiers(
        length,
        in_use,
        state.arena.numel(),
        batch * length * token,
        8 * sum(in_use.values()) / values if values else 0.0,
        int(state.meta[:, PROMOTED].sum()),
        batch * old * shape.kv_heads - used,
        _hottest(state, old),
        _map(state, old, length),
        [float(x) for x in (parts["hot"][0, :, :old] > 0).float().mean(0)] if batch else [],
    )


def _row(part: torch.Tensor) -> int:
    return part[0].numel() * part.dtype.itemsize if part.shape[0] else 0


def _tile_bytes(state: State) -> int:
    """Of all heads of one sequence."""
    names = ("k", "k_scale", "k_low", "v", "v_scale", "v_low")
    found = [state.parts[name] for name in names if name in state.parts]
    return sum(p[0, :, 0].numel() * p.dtype.itemsize for p in found if p.shape[0])


def _hottest(state: State, old: int) -> list[tuple[int, int, int, float]]:
    if not (old and state.layout.budget):
        return []
    rate = rates(state, old)
    _, heads, tiles = rate.shape
    best = rate.flatten().topk(min(HOTTEST, rate.numel()))
    places = [(i // (heads * tiles), i // tiles % heads, i % tiles) for i in best.indices.tolist()]
    return [(*place, r) for place, r in zip(places, best.values.tolist(), strict=True)]


def _map(state: State, old: int, length: int) -> str:
    """One mark a tile, the most exact of what its heads have."""
    start = int(state.meta[0, START]) if old and state.layout.sinks else 0
    marks = []
    for tile in range(state.layout.tiles):
        first, end = tile * TILE, (tile + 1) * TILE
        if first >= length or (not state.layout.bits and end <= length - state.layout.ring):
            marks.append(EMPTY)
        elif tile >= old:
            marks.append(RECENT)
        elif (state.parts["hot"][0, :, tile] > 0).any():
            marks.append(HOT)
        else:
            exact = state.layout.sinks and start < end and start + state.layout.sinks > first
            marks.append(SINKS if exact else PACKED)
    return "".join(marks)
