"""Where things lie in the one tensor that holds a layer's cache: uint8 [batch, bytes of a row].

A row is a sequence, so that reordering, selecting and repeating sequences copies rows and knows nothing else.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..facts import DTYPES

TILE = 64  # tokens that share one scale per key channel and are packed together
PAGE = 16  # tokens a page of a tile
ALIGN = 64  # bytes of a cache line


@dataclass(frozen=True)
class Layout:
    """How one layer keeps its tokens; its text (`str`) is an argument of the ops.

    kept: dtype of what is not packed. max_len: tokens it holds. recent: newest tokens that stay in the model's dtype at least. bits: 4 or 8 for older
    tiles, 0 for none (what leaves the ring is gone). sinks: first tokens of a sequence that stay in full.
    threshold, budget: an old tile stays in full if its mass reaches `threshold` times the layer's 99th
    percentile, and at most that share of the old tiles does; a budget of 0 for none.
    """

    kept: str
    max_len: int
    recent: int
    bits: int = 4
    sinks: int = 0
    threshold: float = 0.75
    budget: float = 0.0

    def __str__(self) -> str:
        numbers = f"{self.max_len}:{self.recent}:{self.bits}:{self.sinks}"
        return f"{self.kept}:{numbers}:{self.threshold}:{self.budget}"

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def parse(text: str) -> Layout:
        """The layout that `str` wrote."""
        parts = text.split(":")
        return Layout(parts[0], *map(int, parts[1:5]), *map(float, parts[5:]))

    @property
    def dtype(self) -> torch.dtype:
        """`kept`, as PyTorch has it."""
        return DTYPES[self.kept]

    @property
    def tiles(self) -> int:
        """Tiles of all tokens."""
        return math.ceil(self.max_len / TILE)

    @property
    def ring(self) -> int:
        """Tokens that the ring of new tokens has room for: the recent ones, and a tile that is not full yet."""
        return min(math.ceil(self.recent / TILE) + 1, self.tiles) * TILE

    @property
    def old(self) -> int:
        """Tiles that may be packed."""
        return max(0, (self.max_len - self.recent) // TILE) if self.bits else 0

    def pool(self, kv_heads: int) -> int:
        """Old tiles of single heads that there is room for in full."""
        return math.ceil(self.budget * self.old * kv_heads) if self.old else 0


@dataclass(frozen=True)
class Shape:
    """A layout with the sizes of the model."""

    layout: Layout
    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class Span:
    """A part of a row: first byte, sizes, dtype."""

    start: int
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """How long it is."""
        return math.prod(self.size) * self.dtype.itemsize


META = 8  # int64 words: see `state.State`


@functools.lru_cache(maxsize=256)
def spans(shape: Shape) -> dict[str, Span]:
    """Every part of a row by name, in the order in which they lie; each starts at a cache line."""
    layout, heads, kept = shape.layout, shape.kv_heads, shape.layout.dtype
    old, pool = layout.old, layout.pool(heads)
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "meta": ((META,), torch.int64),
        "ring_k": ((heads, layout.ring, shape.head_dim), kept),
        "ring_v": ((heads, layout.ring, shape.value_dim), kept),
        "sink_k": ((heads, layout.sinks, shape.head_dim), kept),
        "sink_v": ((heads, layout.sinks, shape.value_dim), kept),
        "pool_k": ((pool, TILE, shape.head_dim), kept),
        "pool_v": ((pool, TILE, shape.value_dim), kept),
        "hot": ((heads, old), torch.int16),
        "mass": ((heads, layout.tiles), torch.float32),
        "seen": ((layout.tiles,), torch.float32),
    }
    store = torch.uint8 if layout.bits == 4 else torch.int8
    for name, dim in (("k", shape.head_dim), ("v", shape.value_dim)):
        if not old:
            break
        scales = (heads, old, dim if name == "k" else TILE)
        sizes[name] = ((heads, old, TILE, dim // 2 if layout.bits == 4 else dim), store)
        sizes[f"{name}_scale"] = (scales, torch.float16)
        if layout.bits == 4:
            sizes[f"{name}_low"] = (scales, torch.float16)
    found, at = {}, 0
    for part, (size, dtype) in sizes.items():
        found[part] = Span(at, size, dtype)
        at = math.ceil((at + found[part].bytes) / ALIGN) * ALIGN
    return found


def row_bytes(shape: Shape) -> int:
    """Bytes of a sequence."""
    last = [*spans(shape).values()][-1]
    return math.ceil((last.start + last.bytes) / ALIGN) * ALIGN
