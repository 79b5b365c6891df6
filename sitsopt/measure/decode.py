"""Greedy decoding with a static cache: the same plain loop for every torch engine.

Two calls compile, one of N tokens and one of a single token; nothing compiles after the first round.
Sizes and strides never change between calls: a row of one token must always be the same buffer,
since Dynamo guards the strides even of size-1 dimensions.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sitsopt.measure.errors import InputError
from sitsopt.runtime.kv.cache import of_recipe
from sitsopt.spec.recipe_form import KVCache


@dataclass(frozen=True)
class Run:
    """One prefill and the tokens after it. The first of `tokens` is the prefill's own."""

    prefill_s: float
    decode_s: float
    tokens: list[int]


class Decoder:
    """A causal language model, a callable that runs it, and a static cache of `max_len` tokens: the one that `kv`
    describes, or the recipe of the callable."""

    def __init__(
        self, model: nn.Module, call: Callable[..., Any], max_len: int, kv: KVCache | None = None
    ) -> None:
        self.model, self.call, self.max_len = model, call, max_len
        self.device = next(model.parameters()).device
        self.kv = kv or wanted_cache(call)
        self.cache = static_cache(model, max_len, self.kv)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.extra = {cache_argument(model): self.cache, "use_cache": True}

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor, all_logits: bool = False) -> torch.Tensor:
        """Run `ids` (one row) from an empty cache; logits of the last token, or of all of them."""
        self.cache.reset()
        return self._logits(ids, 0 if all_logits else 1)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Run `ids` (one row) behind what is in the cache; logits of all of them."""
        return self._logits(ids, 0)

    @torch.no_grad()
    def step(self, logits: torch.Tensor) -> torch.Tensor:
        """Take the likeliest token of `logits` and run it; the next logits."""
        self.pick(logits)
        return self._logits(self.token, 1)

    def pick(self, logits: torch.Tensor) -> None:
        """Put the likeliest next token into `self.token`, in place."""
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    @torch.no_grad()
    def run(self, ids: torch.Tensor, new: int) -> Run:
        """Prefill, then `new` greedy steps; both timed, tokens read once at the end."""
        out = torch.zeros(new + 1, dtype=torch.long, device=self.device)
        start = self._now()
        self.pick(self.prefill(ids))
        out[0] = self.token[0, 0]
        middle = self._now()
        for place in range(1, new + 1):
            self.pick(self._logits(self.token, 1))
            out[place] = self.token[0, 0]
        end = self._now()
        return Run(middle - start, end - middle, out.tolist())

    def stream(self, ids: torch.Tensor, stop: set[int]) -> Iterator[int]:
        """Greedy tokens one by one, up to one of `stop` or to the end of the cache."""
        logits = self.prefill(ids)
        for _ in range(self.max_len - ids.shape[1]):
            self.pick(logits)
            token = int(self.token)
            if token in stop:
                return
            yield token
            with torch.no_grad():
                logits = self._logits(self.token, 1)

    def _logits(self, ids: torch.Tensor, keep: int) -> torch.Tensor:
        if self.device.type == "cuda":  # a captured graph may write over what its last run returned
            torch.compiler.cudagraph_mark_step_begin()
        return self.call(input_ids=ids, logits_to_keep=keep, **self.extra).logits

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def cache_argument(model: nn.Module) -> str:
    """What the model's forward calls its cache: `cache` since transformers 5.20 or so."""
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise InputError(f"{type(model).__name__} takes no cache: a causal language model is needed")


def wanted_cache(call: Any) -> KVCache | None:
    """What the recipe of a compiled call says about its cache."""
    recipe = getattr(getattr(call, "session", None), "recipe", None)
    found: KVCache | None = getattr(recipe, "kv_cache", None)
    return found


def static_cache(model: Any, max_len: int, kv: KVCache | None = None) -> Any:
    """A static cache with its tensors laid out, so that the first call compiles what later ones run."""
    argument = cache_argument(model)
    from transformers import StaticCache

    limit = getattr(text_config(model), "max_position_embeddings", None)
    if limit and max_len > limit:
        raise InputError(f"{max_len} tokens are more than the model's {limit}")
    if kv is not None:
        quantized = of_recipe(model.config, kv, max_len)
        quantized.prepare(model)
        return quantized
    cache = StaticCache(config=model.config, max_cache_len=max_len)
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():  # the model knows its own heads; some have more than one size
        model(input_ids=token, use_cache=True, **{argument: cache})
    cache.reset()
    return cache


def text_config(model: Any) -> Any:
    """The part of the configuration that is about text."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def slides(model: Any) -> bool:
    """Whether some layers keep a window only: they count in Python, so sizes look new at each step."""
    kinds = getattr(text_config(model), "layer_types", None) or ()
    return any("sliding" in kind or "chunked" in kind for kind in kinds)
