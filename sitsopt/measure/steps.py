"""Typical calls of a model, with inputs that hold nothing: what a graph looks like does not depend on their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..runtime.kv.cache import of_recipe
from ..spec.errors import Pos, SpecError, did_you_mean
from ..spec.recipe_form import KVCache

PREFILL = 512
CONTEXT = 1024
ENCODED = 128  # tokens that an encoder gets


@dataclass(frozen=True)
class Step:
    """One call: `model(*args, **kwargs)`."""

    name: str
    kwargs: dict[str, Any]
    args: tuple[Any, ...] = ()


def steps(
    model: nn.Module, wanted: Sequence[str] = (), inputs: Any = None, kv: KVCache | None = None
) -> list[Step]:
    """The calls that show what a model does: a decode step and a prefill of one that generates, else one forward.

    `wanted` picks some by name; `inputs` (a tuple, a dict or a tensor) replaces them all by one forward; `kv` describes the cache. `kv`: the cache to give it. Raises SpecError for an unknown name, and for a model whose inputs are not known.
    """
    made = _known(model, inputs, kv)
    for name in wanted:
        if name not in made:
            raise SpecError(
                Pos("--graphs"),
                f"this model has no step `{name}`",
                expected=", ".join(made),
                hint=did_you_mean(name, made),
            )
    with torch.no_grad():
        return [Step(n, *make()) for n, make in made.items() if not wanted or n in wanted]


Call = tuple[dict[str, Any], tuple[Any, ...]]


def _known(model: nn.Module, inputs: Any, kv: KVCache | None) -> dict[str, Callable[[], Call]]:
    config = getattr(model, "config", None)
    if inputs is not None:
        return {"forward": lambda: _given(inputs)}
    if config is None or not hasattr(model, "main_input_name"):
        raise SpecError(
            Pos(type(model).__name__),
            "nothing says what this model takes",
            hint="let its factory return (model, example inputs)",
        )
    if _generates(model):
        tokens = min(PREFILL, _most_tokens(config))
        return {
            "decode": lambda: (_cached(model, 1, kv), ()),
            "prefill": lambda: (_cached(model, tokens, kv), ()),
        }
    return {"forward": lambda: (_whole(model), ())}


def _given(inputs: Any) -> Call:
    if isinstance(inputs, dict):
        return inputs, ()
    return {}, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def _generates(model: Any) -> bool:
    asks = getattr(model, "can_generate", None)
    decoder_only = not getattr(model.config, "is_encoder_decoder", False)
    return bool(asks and asks()) and decoder_only and model.main_input_name == "input_ids"


def _text(config: Any) -> Any:
    """The part of a config that is about text; a model of several kinds of input nests it."""
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if get else config


def _most_tokens(config: Any) -> int:
    return int(getattr(_text(config), "max_position_embeddings", None) or CONTEXT)


def _facts(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    weights = [p for p in model.parameters() if p.is_floating_point()]
    return (
        (weights[0].device, weights[0].dtype) if weights else (torch.device("cpu"), torch.float32)
    )


def _cached(model: Any, tokens: int, kv: KVCache | None) -> dict[str, Any]:
    """Token ids and a static cache that is laid out already, as generate() has it from the second call on."""
    device, _ = _facts(model)
    names = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    return {"input_ids": ids, cache_name: _cache(model, cache_name, kv), "use_cache": True}


def _cache(model: Any, name: str, kv: KVCache | None) -> Any:
    from transformers import StaticCache

    device, dtype = _facts(model)
    if kv is not None:
        quantized = of_recipe(model.config, kv, min(kv.max_seq_len, _most_tokens(model.config)))
        quantized.prepare(model)
        return quantized
    cache = StaticCache(config=model.config, max_cache_len=min(CONTEXT, _most_tokens(model.config)))
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:  # the model itself knows its heads best: some have more than one size
        model(input_ids=one, use_cache=True, **{name: cache})
        cache.reset()
    except (
        RuntimeError,
        NotImplementedError,
    ):  # something looked at a value, and a meta tensor has none
        text = _text(model.config)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        cache.early_initialization(1, heads, size, dtype, device)
    return cache


def _whole(model: Any) -> dict[str, Any]:
    """Inputs of one forward, by what the model calls its main one."""
    device, dtype = _facts(model)
    config = model.config
    tokens = min(ENCODED, _most_tokens(config))
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    makers: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "input_ids": lambda: {"input_ids": ids},
        "pixel_values": lambda: {"pixel_values": _zeros(_image(config), dtype, device)},
        "input_features": lambda: {"input_features": _zeros(_frames(config), dtype, device)},
        "input_values": lambda: {"input_values": _zeros((1, 16000), dtype, device)},
    }
    if model.main_input_name not in makers:
        raise SpecError(
            Pos(type(model).__name__),
            f"no inputs are known for a model whose main one is `{model.main_input_name}`",
            expected=", ".join(makers),
        )
    made = makers[model.main_input_name]()
    names = inspect.signature(model.forward).parameters
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        made["decoder_input_ids"] = ids[:, : tokens // 4]
    if hasattr(config, "vision_config") and "pixel_values" in names:
        made |= makers["pixel_values"]()
    more: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    return made | more


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def _image(config: Any) -> tuple[int, int, int, int]:
    part = getattr(config, "vision_config", config)
    size = getattr(part, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return 1, getattr(part, "num_channels", None) or 3, height, width


def _frames(config: Any) -> tuple[int, int, int]:
    return 1, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)
