"""`QuantizedKVCache`: a static cache whose old tokens are kept in few bits, except for those that matter."""

from __future__ import annotations

import math
from typing import Any

from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    StaticLayer,
    get_layer_types_and_kwargs,
)

from ...graph.kv.layout import TILE, Layout
from .account import Account, account
from .layer import QuantizedLayer

POLICIES = ("hotness-aware", "recency", "int4", "int8", "none")
HOLD = 16  # newest tokens that are never packed, so that they can be taken back as they were


class QuantizedKVCache(Cache):  # type: ignore[misc]
    """Keys and values of a decoder: recent tokens in the model's dtype, older ones in `bits`.

    config: of the model. max_seq_len: tokens it has room for. quantization_policy: `hotness-aware` keeps the newest
    `window` tokens, the first `sinks` ones and the old tiles of 64 tokens that get most attention (at least
    `fallback_threshold` of the layer's 99th percentile, at most `hot_budget` of the old tiles); `recency` keeps
    window and sinks; `int4` and `int8` keep only tiles that are not full yet; `none` keeps everything. Layers
    with a sliding window keep that window in full. hold: tokens that `crop` gives back exact at least.

    Old tokens go to int4 or int8 tile by tile: keys by channel, values by token (Liu et al., KIVI, 2024). Raises
    ValueError for a policy or a number that means nothing.
    """

    def __init__(
        self,
        config: Any,
        max_seq_len: int = 8192,
        quantization_policy: str = "hotness-aware",
        window: int = 512,
        sinks: int = 4,
        fallback_threshold: float = 0.75,
        hot_budget: float = 0.02,
        bits: int = 4,
        hold: int = HOLD,
    ) -> None:
        check(quantization_policy, max_seq_len, window, sinks, fallback_threshold, hot_budget, bits, hold)  # fmt: skip
        self.policy, self.max_seq_len = quantization_policy, max_seq_len
        self.layout = layout_of(
            quantization_policy, max_seq_len, window, sinks, fallback_threshold, hot_budget, bits, hold
        )  # fmt: skip
        kinds, kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        super().__init__(layers=[self._layer(k, kw, hold) for k, kw in zip(kinds, kwargs, strict=True)])  # fmt: skip

    def _layer(self, kind: str, kwargs: dict[str, Any], hold: int) -> Any:
        made = STATIC_LAYER_TYPE_MAPPING[kind]
        window = kwargs.get("sliding_window")
        if kind == "full_attention":
            return QuantizedLayer(self.layout)
        if (
            window is not None
            and issubclass(made, StaticLayer)
            and not hasattr(made, "update_conv_state")
        ):
            return QuantizedLayer(Layout("f32", self.max_seq_len, window + hold, bits=0), window)
        return made(max_cache_len=self.max_seq_len, **kwargs)

    def account(self) -> Account:
        """What it holds: bytes by tier, bits, tiles kept in full and packed, by layer; text and a picture of it."""
        return account(self.policy, self.layers)

    def prepare(self, model: Any, batch: int = 1) -> None:
        """Allocate it for `batch` sequences on `model`, as its first call otherwise does: a compiled model can write in
        place only what was there before it was traced. Does nothing the second time."""
        if self.is_initialized:
            return
        weight = next(p for p in model.parameters() if p.is_floating_point())
        config = model.config.get_text_config(decoder=True)
        layers = [config.per_layer_config[i] for i in range(len(self.layers))]
        sizes = [sizes_of(one) for one in layers]
        heads, dims = ([size[i] for size in sizes] for i in range(2))
        self.early_initialization(batch, heads, dims, weight.dtype, weight.device)


def of_recipe(config: Any, wanted: Any, max_len: int | None = None) -> QuantizedKVCache:
    """The cache that the section `kv_cache` of a recipe describes; `max_len` instead of its `max_seq_len`."""
    return QuantizedKVCache(
        config,
        max_len or wanted.max_seq_len,
        wanted.policy,
        wanted.window,
        wanted.sinks,
        wanted.fallback_threshold,
        wanted.hot_budget,
        wanted.bits,
    )


def sizes_of(config: Any) -> tuple[int, int]:
    """Key heads and their size, by a configuration."""
    queries = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or queries
    return heads, getattr(config, "head_dim", None) or config.hidden_size // queries


def check(
    policy: str, max_len: int, window: int, sinks: int, threshold: float, budget: float, bits: int, hold: int
) -> None:  # fmt: skip
    """Raises ValueError, naming the argument."""
    if policy not in POLICIES:
        raise ValueError(f"quantization_policy is {policy!r}: one of {', '.join(POLICIES)}")
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits!r}: 4 or 8")
    for name, value, least in (("max_seq_len", max_len, 1), ("window", window, 0), ("sinks", sinks, 0), ("hold", hold, 0)):  # fmt: skip
        if value < least:
            raise ValueError(f"{name} is {value!r}: at least {least}")
    for name, share in (("fallback_threshold", threshold), ("hot_budget", budget)):
        if not (math.isfinite(share) and 0 <= share <= 1):
            raise ValueError(f"{name} is {share!r}: between 0 and 1")


def layout_of(
    policy: str, max_len: int, window: int, sinks: int, threshold: float, budget: float, bits: int, hold: int
) -> Layout:  # fmt: skip
    """How a layer without a sliding window keeps its tokens under a policy. The dtype shows with the first token."""
    whole = math.ceil(max_len / TILE) * TILE
    recent = max(window, hold)
    if policy == "none":
        return Layout("f32", max_len, whole, 0)
    if policy in ("int4", "int8"):
        return Layout("f32", max_len, hold, int(policy[3:]))
    return Layout(
        "f32", max_len, recent, bits, sinks, threshold, budget * (policy == "hotness-aware")
    )
