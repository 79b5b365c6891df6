"""A static cache for `model.generate()` of an optimized model, without a word of it in the model's own settings.

A setting in `generation_config` would be written out by `save_pretrained` and refuse a cache that the caller brings.
So `generate` of the one object is replaced by a method that asks for the static cache in the call, where the caller
asks for nothing else.
"""

from __future__ import annotations

import types
from typing import Any

# Arguments that choose a cache, or a way of decoding that takes positions back: those need one that can shrink.
OWN_CACHE = ("cache", "past_key_values", "cache_implementation", "assistant_model", "prompt_lookup_num_tokens",
             "assistant_early_exit", "custom_generate")  # fmt: skip


def install(model: Any) -> bool:
    """Give `model.generate()` a static cache by default. False where the object has a `generate` of its own."""
    if "generate" in vars(model):
        return getattr(vars(model)["generate"], "__func__", None) is generate
    model.generate = types.MethodType(generate, model)
    return True


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's `generate`; a cache of fixed size keeps the decode graph the same at every token."""
    own = type(self).generate
    compiled = getattr(self, "_compiled_call_impl", None) is not None  # a deep copy is not
    if not compiled or _chosen(self, kwargs, args):
        return own(self, *args, **kwargs)
    return own(self, *args, **kwargs, cache_implementation="static")


def _chosen(model: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> bool:
    configs = [model.generation_config, kwargs.get("generation_config"), *args[1:2]]
    wanted = [kwargs, *(vars(config) for config in configs if config is not None)]
    return any(
        one.get("use_cache") is False or any(one.get(name) is not None for name in OWN_CACHE)
        for one in wanted
    )
