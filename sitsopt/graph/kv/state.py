"""A layer's cache in plain PyTorch: the reference that every kernel must agree with, and what runs without one.

Tokens [0, committed * 64) are old: packed tiles, except for those in the pool and the first tokens of the sequence.
Tokens [committed * 64, length) are in the ring, token p at place p mod ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .layout import TILE, Layout, Shape, row_bytes, spans
from .packing import pack, unpack

COMMITTED, USED, START, PROMOTED = range(
    4
)  # words of `meta`: old tiles, pool slots taken, the first
# token of the sequence (padding lies before it), tiles ever put into the pool


class CacheFull(RuntimeError):
    """More tokens than the cache was made for. It is as it was before the call."""


def empty(shape: Shape, batch: int, device: torch.device) -> torch.Tensor:
    """A cache without tokens."""
    return torch.zeros(batch, row_bytes(shape), dtype=torch.uint8, device=device)


@dataclass
class Fresh:
    """Tiles [old, now) that one step has packed, and their tokens [B, Hk, n, D] as they were."""

    old: int
    now: int
    k: torch.Tensor
    v: torch.Tensor


class State:
    """The parts of one layer's cache, as views of its tensor. Sizes as in `layout.spans`, behind the batch."""

    def __init__(self, arena: torch.Tensor, shape: Shape) -> None:
        self.arena, self.shape, self.layout = arena, shape, shape.layout
        self.parts = {
            name: arena[:, s.start : s.start + s.bytes].view(s.dtype).unflatten(1, s.size)
            for name, s in spans(shape).items()
        }
        self.meta = self.parts["meta"]

    @property
    def committed(self) -> int:
        """Old tiles."""
        return int(self.meta[0, COMMITTED]) if self.meta.shape[0] else 0

    def read(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, Hk, max_len, D] and values, dequantized; zeros where there is no token."""
        return self._read("k", length), self._read("v", length)

    def _read(self, name: str, length: int) -> torch.Tensor:
        ring = self.parts[f"ring_{name}"]
        batch, heads, size, dim = ring.shape
        out = ring.new_zeros(batch, heads, self.layout.max_len, dim)
        old = self.committed
        if old:
            self._read_old(name, out, old)
        first = max(old * TILE, length - size)
        if length > first:
            out[:, :, first:length] = ring[:, :, self._places(first, length)]
        return out

    def _read_old(self, name: str, out: torch.Tensor, old: int) -> None:
        per = -2 if name == "k" else -1
        fields = [name, f"{name}_scale", *[f"{name}_low"] * (self.layout.bits == 4)]
        packed = tuple(self.parts[field][:, :, :old] for field in fields)
        tiles = unpack(packed, per).to(out.dtype)
        hot = self.parts["hot"][:, :, :old]
        if hot.any():
            row, head, tile = hot.nonzero(as_tuple=True)
            slot = hot[row, head, tile].long() - 1
            tiles[row, head, tile] = self.parts[f"pool_{name}"][row, slot]
        out[:, :, : old * TILE] = tiles.flatten(2, 3)
        for row, start in enumerate(self.meta[:, START].tolist()):
            count = min(self.layout.sinks, old * TILE - start)
            if count > 0:
                out[row, :, start : start + count] = self.parts[f"sink_{name}"][row, :, :count]

    def _places(self, first: int, end: int) -> torch.Tensor:
        return torch.arange(first, end, device=self.arena.device) % self.layout.ring

    def check_room(self, length: int, tokens: int) -> None:
        """Raises CacheFull where `tokens` more do not fit."""
        if length + tokens > self.layout.max_len:
            raise CacheFull(
                f"{length} + {tokens} tokens are more than this cache's max_seq_len of {self.layout.max_len}; "
                "it is unchanged"
            )

    def append(self, length: int, k: torch.Tensor, v: torch.Tensor) -> Fresh:
        """Store k, v [B, Hk, T, D]; tiles that are now old are packed, and returned."""
        total = length + k.shape[2]
        now = max(self.committed, min((total - self.layout.recent) // TILE, self.layout.old))
        fresh = self.commit(length, k, v, now)
        for name, new in (("k", k), ("v", v)):
            ring = self.parts[f"ring_{name}"]
            count = min(new.shape[2], self.layout.ring)
            ring[:, :, self._places(total - count, total)] = new[:, :, new.shape[2] - count :].to(ring.dtype)  # fmt: skip
        return fresh

    def commit(self, length: int, k: torch.Tensor, v: torch.Tensor, now: int) -> Fresh:
        """Pack all tiles before `now`, whose tokens are among the `length` stored ones and k, v behind them."""
        old = self.committed
        fresh = Fresh(old, now, k[:, :, :0], v[:, :, :0])
        if now > old:
            fresh.k = self._commit("k", k, length, old, now)
            fresh.v = self._commit("v", v, length, old, now)
            self.meta[:, COMMITTED] = now
            self.keep_sinks(fresh)
        return fresh

    def _commit(
        self, name: str, new: torch.Tensor, length: int, old: int, now: int
    ) -> torch.Tensor:
        ring = self.parts[f"ring_{name}"]
        waiting = ring[:, :, self._places(old * TILE, length)]
        both = torch.cat([waiting, new.to(ring.dtype)], 2)[:, :, : (now - old) * TILE]
        packed = pack(both.unflatten(2, (-1, TILE)), self.layout.bits, -2 if name == "k" else -1)
        for field, value in zip((name, f"{name}_scale", f"{name}_low"), packed, strict=False):
            self.parts[field][:, :, old:now] = value
        return both

    def keep_sinks(self, fresh: Fresh) -> None:
        """Keep what is a sequence's first tokens among those just packed."""
        base, stop = fresh.old * TILE, fresh.now * TILE
        for row, start in enumerate(self.meta[:, START].tolist()):
            first, end = max(start, base), min(start + self.layout.sinks, stop)
            if end <= first:
                continue
            for name, tokens in (("k", fresh.k), ("v", fresh.v)):
                sink = self.parts[f"sink_{name}"]
                here = tokens[row, :, first - base : end - base]
                sink[row, :, first - start : end - start] = here.to(sink.dtype)

    def crop(self, length: int, new: int) -> None:
        """Forget all tokens from `new` on. What is left keeps its values: a tile that is cut goes back to the ring as
        it was read. Raises ValueError for tokens that are gone (`bits: 0` keeps a ring only)."""
        old, kept = self.committed, min(self.committed, new // TILE)
        if not self.layout.bits and length > self.layout.ring and length - new > self.spare:
            raise ValueError(
                f"{length - new} tokens cannot be taken back: older ones are gone from the window; at most {self.spare}"
            )
        if old * TILE > new:
            for name in ("k", "v"):
                ring = self.parts[f"ring_{name}"]
                left = self._read(name, length)[:, :, kept * TILE : new]
                ring[:, :, self._places(kept * TILE, new)] = left
        self.meta[:, COMMITTED] = kept
        self._release(kept)
        first = math.ceil(
            new / TILE
        )  # mass of the tile that is cut is a part of what its tokens got
        self.parts["mass"][:, :, first:] = 0
        self.parts["seen"][:, first:] = 0

    @property
    def spare(self) -> int:
        """Tokens that a ring holds beyond the recent ones."""
        return self.layout.ring - self.layout.recent

    def _release(self, kept: int) -> None:
        """Free the pool slots of tiles from `kept` on; the rest move to the front, as slots are taken in order."""
        hot = self.parts["hot"]
        if not hot[:, :, kept:].any():
            return
        hot[:, :, kept:] = 0
        for row in range(hot.shape[0]):
            head, tile = hot[row].nonzero(as_tuple=True)
            order = hot[row, head, tile].argsort()
            head, tile = head[order], tile[order]
            slots = hot[row, head, tile].long() - 1
            for name in ("k", "v"):
                part = self.parts[f"pool_{name}"][row]
                part[: len(slots)] = part[slots]
            hot[row, head, tile] = torch.arange(1, len(slots) + 1, dtype=hot.dtype, device=hot.device)  # fmt: skip
            self.meta[row, USED] = len(slots)


def shape_of(k: torch.Tensor, v: torch.Tensor, layout: str) -> Shape:
    """The shape of the cache that takes these keys and values."""
    return Shape(Layout.parse(layout), k.shape[1], k.shape[3], v.shape[3])
