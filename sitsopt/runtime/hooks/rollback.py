"""What a call of a model has changed in its cache, taken back: so that a call that failed half way can be made again.

A cache is an object with `layers`. Growing layers replace their tensors by longer ones: they are cut to the old
length. Layers of fixed size write at a counter: it is set back, and what stands behind it is written again. A
cache may also bring `snapshot()`, which returns a function that undoes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Undo = Callable[[], None]


class CannotUndo(RuntimeError):
    """A cache that a failed call may have left half written; the text says of what kind."""


def snapshot(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Undo:
    """A function that takes back what happens to the caches among a call's arguments from now on. It raises
    CannotUndo for one that it does not know."""
    undos = [_of_cache(value) for value in (*args, *kwargs.values()) if _is_cache(value)]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def _is_cache(value: Any) -> bool:
    return hasattr(value, "snapshot") or (
        hasattr(value, "layers") and hasattr(value, "get_seq_length")
    )


def _of_cache(cache: Any) -> Undo:
    if hasattr(cache, "snapshot"):
        undo: Undo = cache.snapshot()
        return undo
    before = [_of_layer(layer) for layer in cache.layers]

    def undo_layers() -> None:
        del cache.layers[len(before) :]  # layers that the call added
        for each in before:
            each()

    return undo_layers


def _of_layer(layer: Any) -> Undo:
    keys, counter = getattr(layer, "keys", None), getattr(layer, "cumulative_length", None)
    sliding = bool(getattr(layer, "is_sliding", False))
    if not getattr(layer, "is_initialized", keys is not None):
        return lambda: _empty(layer)
    if keys is None:
        return _cropped(layer)
    fixed = getattr(layer, "max_cache_len", None) is not None
    if sliding and fixed:
        return lambda: _unknown(layer, "shifts in place")
    if fixed:
        return _fixed(layer, counter)
    if sliding:
        return _replaced(layer, counter)
    length = keys.shape[-2]
    return lambda: _cut(layer, length)


def _cropped(layer: Any) -> Undo:
    """A layer that keeps its tokens in its own way, and can forget the newest."""
    if not hasattr(layer, "crop"):
        return lambda: _unknown(layer, "keeps no keys, and cannot forget the newest")
    before = int(layer.get_seq_length())

    def undo() -> None:
        added = int(layer.get_seq_length()) - before
        try:
            layer.crop(-added)
        except ValueError as error:
            _unknown(layer, str(error))

    return undo


def _fixed(layer: Any, counter: Any) -> Undo:
    if counter is None:
        return lambda: None  # positions come with the call
    length = counter.clone() if hasattr(counter, "clone") else counter

    def undo() -> None:
        if hasattr(counter, "copy_"):
            counter.copy_(length)
        else:
            layer.cumulative_length = length

    return undo


def _replaced(layer: Any, counter: Any) -> Undo:
    """A window that is replaced at every call: its tensors are never written, so holding them is enough."""
    keys, values = layer.keys, layer.values

    def undo() -> None:
        layer.keys, layer.values = keys, values
        if counter is not None:
            layer.cumulative_length = counter

    return undo


def _cut(layer: Any, length: int) -> None:
    if layer.keys.shape[-2] != length:
        layer.keys = layer.keys[..., :length, :]
    if layer.values.shape[-2] != length:
        layer.values = layer.values[..., :length, :]


def _empty(layer: Any) -> None:
    if not getattr(layer, "is_initialized", False):
        return
    counter: Any = getattr(layer, "cumulative_length", None)
    if hasattr(counter, "zero_"):
        counter.zero_()
    if getattr(layer, "max_cache_len", None) is None:
        layer.keys = layer.values = None
        layer.is_initialized = False


def _unknown(layer: Any, why: str) -> None:
    raise CannotUndo(f"a cache layer {type(layer).__name__} {why}: the call cannot be made again")
