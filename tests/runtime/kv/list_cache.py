"""A quantized cache as lists of vectors: the plainest thing that does what the documentation says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from sitsopt.graph.kv.layout import Layout

TILE, FEW = 64, 16


@dataclass
class Head:
    """One sequence, one kv head: keys and values as they are read, and the attention its tokens got."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)  # by tile
    full: set[int] = field(default_factory=set)  # old tiles that are kept in full


@dataclass
class Row:
    """One sequence. start: its first token that is no padding; seen: queries that could see a tile."""

    heads: list[Head]
    start: int = 0
    seen: list[int] = field(default_factory=list)
    old: int = 0


class ListCache:
    """Rows of heads. Nothing is shared with the code under test but the numbers of the layout."""

    def __init__(self, layout: Layout, batch: int, heads: int) -> None:
        self.layout, self.count = layout, heads
        self.rows = [Row([Head() for _ in range(heads)]) for _ in range(batch)]
        self.length = 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Tokens k, v [B, Hk, T, D]. A step of few tokens packs what is old before attention reads it."""
        self.length += k.shape[2]
        for b, row in enumerate(self.rows):
            for h, head in enumerate(row.heads):
                head.keys += [x.clone() for x in k[b, h]]
                head.values += [x.clone() for x in v[b, h]]
            if k.shape[2] <= FEW:
                self._commit(row)

    def attended(self, weights: torch.Tensor, seen: torch.Tensor) -> None:
        """Attention gave weights [B, Hk, S]; its queries could see `seen` [B, T', S]. What is old is packed now."""
        for b, row in enumerate(self.rows):
            if row.old == 0 and (self.layout.sinks or self.layout.budget):
                row.start = int(seen[b, -1].int().argmax())
            self._observe(row, weights[b], seen[b])
            self._commit(row)

    def _observe(self, row: Row, weights: torch.Tensor, seen: torch.Tensor) -> None:
        tiles = math.ceil(self.layout.max_len / TILE)
        row.seen = row.seen or [0] * tiles
        for t in range(tiles):
            row.seen[t] += int(seen[:, t * TILE : (t + 1) * TILE].any(-1).sum())
        for h, head in enumerate(row.heads):
            head.mass = head.mass or [0.0] * tiles
            for place, weight in enumerate(weights[h].tolist()):
                if not row.start <= place < row.start + self.layout.sinks:
                    head.mass[place // TILE] += weight

    def _commit(self, row: Row) -> None:
        layout = self.layout
        room = max(0, (layout.max_len - layout.recent) // TILE) if layout.bits else 0
        now = max(row.old, min((self.length - layout.recent) // TILE, room))
        fresh = [(h, t) for h in range(self.count) for t in range(row.old, now)]
        hot = self._hot(row, fresh, now, room) if layout.budget else []
        for h, t in fresh:
            if (h, t) in hot:
                row.heads[h].full.add(t)
            else:
                self._pack(row, row.heads[h], t)
        row.old = now

    def _hot(self, row: Row, fresh: list[tuple[int, int]], now: int, room: int) -> list[tuple[int, int]]:  # fmt: skip
        rate = lambda h, t: _coarse(row.heads[h].mass[t] / max(row.seen[t], 1))  # noqa: E731
        if not row.seen:
            return []
        every = sorted(rate(h, t) for h in range(self.count) for t in range(now))
        if not every:
            return []
        limit = self.layout.threshold * every[math.ceil(0.99 * len(every)) - 1]
        budget = self.layout.budget * self.count
        free = min(math.ceil(budget * room), math.ceil(budget * now)) - sum(len(h.full) for h in row.heads)  # fmt: skip
        good = [p for p in fresh if rate(*p) >= limit and rate(*p) > 0]
        return sorted(good, key=lambda p: -rate(*p))[: max(0, free)]

    def _pack(self, row: Row, head: Head, tile: int) -> None:
        places = range(tile * TILE, (tile + 1) * TILE)
        exact = range(row.start, row.start + self.layout.sinks)
        k = _rounded(torch.stack([head.keys[p] for p in places]), self.layout.bits, 0)
        v = _rounded(torch.stack([head.values[p] for p in places]), self.layout.bits, 1)
        for i, place in enumerate(places):
            if place not in exact:
                head.keys[place], head.values[place] = k[i], v[i]

    def crop(self, length: int) -> None:
        """Forget what comes after."""
        self.length = length
        for row in self.rows:
            row.old = min(row.old, length // TILE)
            first = math.ceil(length / TILE)
            row.seen = [n if t < first else 0 for t, n in enumerate(row.seen)]
            for head in row.heads:
                del head.keys[length:], head.values[length:]
                head.full = {t for t in head.full if t < row.old}
                head.mass = [m if t < first else 0.0 for t, m in enumerate(head.mass)]

    def read(self, name: str) -> torch.Tensor:
        """[B, Hk, length, D]."""
        lists = [[getattr(head, name) for head in row.heads] for row in self.rows]
        return torch.stack([torch.stack([torch.stack(x) for x in row]) for row in lists])


def _coarse(rate: float) -> float:
    """To 12 bits."""
    mantissa, exponent = math.frexp(rate)
    return math.ldexp(round(mantissa * 4096) / 4096, exponent)


def _rounded(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """A tile [64, D] to integers and back; `dim` shares a scale."""
    wide = x.double()
    if bits == 8:
        scale = (x.float().abs().amax(dim, keepdim=True) / 127).half().double().clamp(min=6e-8)
        return (torch.round(wide / scale).clamp(-127, 127) * scale).to(x.dtype)
    low = x.float().amin(dim, keepdim=True).half().double()
    spread = x.float().amax(dim, keepdim=True) - low.float()
    scale = (spread / 15).clamp(min=6e-8).half().double()
    return (torch.round((wide - low) / scale).clamp(0, 15) * scale + low).to(x.dtype)
