"""A static cache for `model.generate()` of an optimized model, without a word of it in the model's own settings.

A setting in `generation_config` would be written out by `save_pretrained` and refuse a cache that the caller brings.
So `generate` of the one object is replaced by a method that asks for the static cache in the call, where the caller
asks for nothing else.
"""

from __future__ import annotations

import inspect
import types
import weakref
from functools import partial
from typing import Any

from .decode import generating
from .runtime.hooks.stepdown import Guarded
from .spec.recipe_form import KVCache

# Arguments that choose a cache, or a way of decoding that takes positions back: those need one that can shrink.
OWN_CACHE = ("cache", "past_key_values", "cache_implementation", "assistant_model", "prompt_lookup_num_tokens",
             "assistant_early_exit", "custom_generate")  # fmt: skip
INPUTS = ("inputs", "input_ids", "inputs_embeds")


_WANTED: weakref.WeakKeyDictionary[Any, KVCache] = weakref.WeakKeyDictionary()  # by model


def install(model: Any, wanted: KVCache | None = None) -> bool:
    """Give `model.generate()` a cache of fixed size by default, the one a recipe wants if it does. False where the
    object has a `generate` of its own."""
    _WANTED.pop(model, None)
    if wanted is not None:
        _WANTED[model] = wanted
    if "generate" in vars(model):
        return getattr(vars(model)["generate"], "__func__", None) is generate
    model.generate = types.MethodType(generate, model)
    return True


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's `generate`; a cache of fixed size keeps the decode graph the same at every token."""
    own = _own(self)
    if getattr(self, "_compiled_call_impl", None) is None:  # a deep copy is not
        return _accounted(self, own(self, *args, **kwargs), kwargs)
    if not _chosen(self, kwargs, args):
        if self not in _WANTED:
            return generating.run(self, own, args, kwargs | {"cache_implementation": "static"})
        from .runtime.kv.cache import of_recipe

        takes = inspect.signature(inspect.unwrap(type(self).forward)).parameters
        name = "cache" if "cache" in takes else "past_key_values"
        kwargs[name] = of_recipe(self.config, _WANTED[self])
    _lay_out(self, args, kwargs)
    return _accounted(self, generating.run(self, own, args, kwargs), kwargs)


def _accounted(model: Any, result: Any, kwargs: dict[str, Any]) -> Any:
    """The result; what the call's cache held is kept for `report`."""
    cache = kwargs.get("cache") or kwargs.get("past_key_values")
    if cache is not None:
        from .runtime.kv.account import note

        note(model, cache)
    return result


def _own(model: Any) -> Any:
    """The class's `generate`, guarded against running out of memory where the calls of the model are."""
    call = getattr(model, "_compiled_call_impl", None)
    own = type(model).generate
    return partial(call.request, own) if isinstance(call, Guarded) else own


def _chosen(model: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> bool:
    configs = [model.generation_config, kwargs.get("generation_config"), *args[1:2]]
    wanted = [kwargs, *(vars(config) for config in configs if config is not None)]
    return any(
        one.get("use_cache") is False or any(one.get(name) is not None for name in OWN_CACHE)
        for one in wanted
    )


def _lay_out(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Allocate a quantized cache before the first call is captured: what a graph makes itself it cannot write in place."""
    from .runtime.kv.cache import QuantizedKVCache

    cache = kwargs.get("cache") or kwargs.get("past_key_values")
    inputs = next((t for t in (*args[:1], *map(kwargs.get, INPUTS)) if t is not None), None)
    if isinstance(cache, QuantizedKVCache) and inputs is not None:
        config = kwargs.get("generation_config") or model.generation_config
        names = ("num_beams", "num_return_sequences")
        beams, returned = (kwargs.get(n) or getattr(config, n, None) or 1 for n in names)
        cache.prepare(model, inputs.shape[0] * max(beams, returned))
