"""What a token costs in a cache, before anything is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .layout import TILE, Layout, Shape, row_bytes, spans


@dataclass(frozen=True)
class Cost:
    """Bytes of one layer: a token in full (`before`) and once it is old (`after`); a sequence of `tokens` in full, and
    all that the cache keeps for it (ring, sinks, hot tiles and bookkeeping with it)."""

    before: float
    after: float
    tokens: int
    whole_before: int
    whole_after: int


def cost(shape: Shape) -> Cost:
    """Of a layer with these sizes. Where nothing is packed a token costs the same at any age."""
    layout = shape.layout
    size = layout.dtype.itemsize
    before = shape.kv_heads * (shape.head_dim + shape.value_dim) * size
    after: float = before
    if layout.old:
        names = ("k", "k_scale", "k_low", "v", "v_scale", "v_low")
        packed = sum(span.bytes for name, span in spans(shape).items() if name in names)
        after = packed / (layout.old * TILE)
    return Cost(before, after, layout.max_len, before * layout.max_len, row_bytes(shape))


def cost_of_site(binding: Mapping[str, str]) -> Cost | None:
    """By what a rule bound at a site; None where that is no cache, or sizes were not bound."""
    try:
        layout, sizes = binding["layout"], [int(binding[name]) for name in ("Hk", "D", "Dv")]
        return cost(Shape(Layout.parse(layout), *sizes))
    except (KeyError, ValueError, IndexError, TypeError):
        return None
