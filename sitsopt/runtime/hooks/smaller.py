"""A cache in use, made smaller: the step `cache` of the guard.

A cache may bring `step_down()`, which says what it did. Of a static cache of transformers every layer without a window
becomes one in 4 bits, a layer at a time, so that at no moment two whole caches are there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .stepdown import Call, Done, Step, is_allocation_failure

WORTH = 0.75  # of its bytes: a layer that would stay larger is left


def shrink_cache(eager: Callable[..., Any] | None = None) -> Step:
    """The step for the caches among a call's arguments. `eager` runs the calls from then on: what was compiled is for
    the old cache, and compiling anew needs memory. Without it only caches with a `step_down()` are made smaller."""

    def caches(call: Call) -> list[Any]:
        return [v for v in (*call.args, *call.kwargs.values()) if _can(v, eager is not None)]

    def take(call: Call) -> Done:
        most, texts, parts = call.most, [], 0
        for cache in caches(call):
            done = _shrink(cache, None if most is None else most - parts)
            texts.append(done.text)
            parts += done.parts or 0
        return Done("; ".join(texts), parts or None)

    def missing(call: Call) -> str:
        return "" if caches(call) else "the cache in use has no smaller form"

    return Step("cache", take, missing, eager)


def _can(value: Any, static: bool) -> bool:
    return hasattr(value, "step_down") or (static and bool(_static(value)))


def _static(value: Any) -> list[int]:
    """Which layers are static ones that would become smaller: a short one would not."""
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or not isinstance(value, caches.Cache):
        return []
    return [
        place
        for place, layer in enumerate(value.layers)
        if type(layer) is caches.StaticLayer and layer.is_initialized and _pays(layer)
    ]


def _shrink(cache: Any, most: int | None) -> Done:
    if hasattr(cache, "step_down"):
        return Done(str(cache.step_down()))
    places, done = _static(cache), 0
    before = sum(_bytes(layer) for layer in cache.layers)
    for place in places[:most]:
        try:
            cache.layers[place] = _packed(cache.layers[place])
        except Exception as error:
            if not is_allocation_failure(error):
                raise
            break  # this layer and those behind it stay as they are
        done += 1
    if not done:
        return Done("nothing: not even one layer's packed form finds room")
    after = sum(_bytes(layer) for layer in cache.layers)
    text = f"{done} of {len(places)} layers in 4 bits: {before / 1e6:.1f} MB are {after / 1e6:.1f}"
    return Done(text, done)


def _bytes(layer: Any) -> int:
    parts = (getattr(layer, name, None) for name in ("keys", "values", "state"))
    return sum(part.nbytes for part in parts if part is not None)


def _empty(layer: Any) -> Any:
    from ..kv.cache import HOLD, layout_of
    from ..kv.layer import QuantizedLayer

    return QuantizedLayer(layout_of("int4", layer.max_cache_len, 0, 0, 0.0, 0.0, 4, HOLD))


def _pays(layer: Any) -> bool:
    made = _empty(layer)
    made.lazy_initialization(layer.keys.to("meta"), layer.values.to("meta"))
    return _bytes(made) <= WORTH * _bytes(layer)


def _packed(layer: Any) -> Any:
    made, length = _empty(layer), int(layer.get_seq_length())
    kept = (layer.keys[:, :, :length], layer.values[:, :, :length])
    if length:
        made.update(*kept)
    else:
        made.lazy_initialization(*kept)
    return made
