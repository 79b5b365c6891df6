"""What the loop has to know of a model and its cache: names, sizes, what can be taken back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..graph.kv.layout import TILE, Layout
from ..runtime.kv.cache import HOLD, QuantizedKVCache
from .runner import Runner, can_take_back
from .sizes import block_rows

FAST = "compiled calls of fixed sizes on a static cache"  # why the loop is the fast one


def argument(model: Any) -> str:
    """What a model calls its cache."""
    return "cache" if takes(model, "cache") else "past_key_values"


def takes(model: Any, name: str) -> bool:
    """Whether a model's forward has such an argument."""
    return name in inspect.signature(inspect.unwrap(type(model).forward)).parameters


def lay_out(model: Any, cache: Any, batch: int) -> None:
    """Allocate a cache by an uncompiled call: the model knows its own heads."""
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model.forward(input_ids=token, use_cache=True, **{argument(model): cache})
    cache.reset()


def windows(cache: Any) -> bool:
    """Whether some layers keep a window only: they count in Python, so sizes would vary."""
    return any(layer.is_sliding for layer in cache.layers)


def why_plain(cache: Any, batch: int) -> str:
    """Why nothing is proposed in an answer of so many rows on this cache; empty if it can be."""
    if batch > 1:
        return "several sequences at once are decoded one token at a time"
    if not can_take_back(cache):
        return "a layer of the cache cannot take tokens back"
    if any(layout.old and layout.budget for layout in _layouts(cache)):
        return (
            "the cache keeps the tiles in full that get most attention, and tokens that are proposed and rejected"
            " would have had a part in it"
        )
    return ""


def rows_before_packing(layouts: set[Layout], length: int) -> int:
    """Tokens that can be put behind `length` others before any layer packs a tile: up to then every token lies in a
    ring, and what is taken back leaves the cache as if it had never been there."""
    left = [
        TILE - 1 - (length - one.recent) % TILE
        if length >= one.recent
        else one.recent + TILE - 1 - length
        for one in layouts
        if one.old
    ]
    return min(left, default=2**31)


def runner_of(
    model: Any,
    call: Callable[..., Any],
    cache: Any,
    most: int = 0,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> Runner:
    """The runner of a compiled `call` of `model` on a cache that is laid out; blocks have up to `most` proposals."""
    quantized = isinstance(cache, QuantizedKVCache)
    most = min(most, HOLD - 1) if quantized else most
    layouts = _layouts(cache)
    return Runner(
        call, cache, argument(model), keeps=takes(model, "logits_to_keep"),
        padded=can_take_back(cache) and not quantized, blocks=block_rows(most) if most else (),
        mask=mask, positions=positions,
        free=(lambda length: rows_before_packing(layouts, length)) if quantized else None,
    )  # fmt: skip


def _layouts(cache: Any) -> set[Layout]:
    """How the layers of a quantized cache keep tokens; empty for other caches."""
    return {layer.layout for layer in cache.layers if hasattr(layer, "layout")}
