"""What proposes tokens for a model, by the section `speculate` of its recipe."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .decode.drafts import Draft, Lookup, OtherModel, OwnLayers
from .decode.fitting import argument, lay_out, takes
from .decode.loop import Speculation
from .decode.runner import Runner
from .decode.sizes import cache_length
from .rewrite.record import Effective
from .session import Session

Compile = Callable[[nn.Module, Mapping[str, Any]], Any]
ROOM = 4096  # tokens that the cache of another model has room for; beyond it that model proposes nothing


class NoDraft(ValueError):
    """A draft that a model cannot have; the text says why."""


def speculation_of(
    model: nn.Module, session: Session, options: Mapping[str, Any], compile: Compile
) -> Speculation | None:
    """The speculation that a session's recipe asks for, or None; `effective` says what came of it. options: those of
    the model, for the drafts that are compiled with it. Raises what loading a model raises."""
    wanted = session.recipe.speculate
    if wanted is None:
        return None
    try:
        draft = draft_of(model, wanted.draft, options, compile)
    except NoDraft as error:
        lost = Effective(f"speculate: {wanted.draft}", "nothing", str(error))
        session.record.effective.append(lost)
        return None
    ratio = wanted.entropy_ratio if wanted.acceptance == "adaptive" else None
    law = (
        "the law is the model's own"
        if ratio is None
        else f"up to {ratio:g} of the entropy is let pass"
    )
    session.record.effective.append(Effective(f"speculate: {wanted.draft}", wanted.acceptance, law))
    return Speculation(draft, wanted.max_tokens, ratio)


def draft_of(model: nn.Module, name: str, options: Mapping[str, Any], compile: Compile) -> Draft:
    """`prompt-lookup`; `layer-skip`: the first half of the layers; `int4`, `int8`: the model with weights of so many bits;
    else another model, by its name. Raises NoDraft."""
    if name == "prompt-lookup":
        return Lookup()
    recipe = options.get("recipe", "auto")
    recipes = [*(recipe if isinstance(recipe, list) else [recipe]), {"speculate": None}]
    if name == "layer-skip":
        short, count = first_layers(model)
        return OwnLayers(
            name, compile(short, {**options, "recipe": [*recipes, {"expect": None}]}), count
        )
    if name in ("int4", "int8"):
        call = compile(model, {**options, "recipe": [*recipes, name]})
        return OwnLayers(name, call, len(_layers(model)))
    return other_model(model, name.removeprefix("model:"), {**options, "recipe": "auto"}, compile)


def first_layers(model: Any) -> tuple[Any, int]:
    """A model with the first half of the layers; everything in it is the model's own. Raises NoDraft."""
    layers = _layers(model)
    count = (len(layers) + 1) // 2
    short, decoder = _shallow(model), _shallow(model.base_model)
    setattr(short, model.base_model_prefix, decoder)
    decoder.layers = layers[:count]
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    short.config = decoder.config = config
    return short, count


def other_model(model: Any, name: str, options: Mapping[str, Any], compile: Compile) -> OtherModel:
    """A model by its name, with a cache of its own, in the dtype and on the device of `model`."""
    models = importlib.import_module("sitsopt.measure.models")  # the loader lies above
    weight = next(model.parameters())
    small = models.load(name, weight.dtype, device=weight.device).model
    from transformers import StaticCache

    limit = getattr(small.config.get_text_config(), "max_position_embeddings", None) or ROOM
    cache = StaticCache(config=small.config, max_cache_len=cache_length(min(ROOM, limit)))
    lay_out(small, cache, 1)
    runner = Runner(
        compile(small, options), cache, argument(small), keeps=takes(small, "logits_to_keep")
    )
    return OtherModel(f"model:{name}", runner, small.get_input_embeddings().num_embeddings)


def _layers(model: Any) -> nn.ModuleList:
    found = getattr(getattr(model, "base_model", None), "layers", None)
    if not isinstance(found, nn.ModuleList) or model.base_model is model:
        raise NoDraft(
            f"the layers of {type(model).__name__} are not found under `base_model.layers`"
        )
    return found


def _shallow(module: Any) -> Any:
    """The same parameters and modules in an object of its own."""
    found = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        setattr(found, name, dict(vars(module)[name]))
    return found
