"""`sitsopt.optimize(model, recipe)`: the whole recipe in one call; the model stays the same object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import nn

from . import fixed_cache, hooked, speculating
from .backend import sits
from .decode import generating
from .dispatch.dispatcher import Dispatcher
from .options import Options
from .planning import make_session
from .rewrite.record import Effective
from .runtime.hooks.stepdown import Step
from .session import Session, find_or_make

M = TypeVar("M", bound=nn.Module)
OPTIONS = {f.name for f in fields(Options)} - {"recipe"}


def compiled_call(
    model: nn.Module,
    options: Mapping[str, Any],
    dynamic: bool | None = None,
    speculates: bool = False,
) -> Dispatcher:
    """The compiled call of `model` under the backend's options, beside the model: nothing in it changes. speculates: the
    caller's loop uses `session.extra["speculation"]`, what the recipe proposes with; else that is told to be left out.

    Raises SpecError at once; at the first call what `optimize` raises there.
    """
    parsed = Options.parse(options)
    outside = ("kv_cache", *["speculate"] * speculates)
    session = find_or_make(
        model, parsed, None, lambda: make_session(model, parsed, outside=outside)
    )
    if speculates:
        _speculate(model, session, options)
    ordinary = torch.compile(model, backend=sits, dynamic=dynamic, options=dict(options))
    return Dispatcher(model, session, ordinary, dynamic)


def _speculate(model: nn.Module, session: Session, options: Mapping[str, Any]) -> None:
    """Leave what proposes tokens in the session, once."""
    if "speculation" not in session.extra:
        found = speculating.speculation_of(model, session, options, compiled_call)
        session.extra["speculation"] = found


def optimize(model: M, recipe: Any = "auto", **overrides: Any) -> M:
    """Compile `model` in place by a recipe and return it; `model.generate()` keeps working, compiled.

    recipe: as in `torch.compile`'s options. overrides: any other option (`target=`, `strict=`, `lowering=`, …),
    or a section of the recipe (`exclude={...}`, `weights=[...]`) laid on top of it. `state_dict`, `save_pretrained`
    and `deepcopy` see the model as it was; a deep copy is not compiled.

    Raises SpecError for a bad recipe or override, at once; ExpectationError and (under `strict`) LoweringError at
    the first call.
    """
    sections = {
        k: v
        for k, v in overrides.items()
        if k not in OPTIONS or (isinstance(v, Mapping) and k != "inductor")
    }
    options = {k: v for k, v in overrides.items() if k not in sections}
    if sections:
        recipe = [*(recipe if isinstance(recipe, list) else [recipe]), sections]
    given = {"recipe": recipe, **options}
    parsed = Options.parse(given)
    generates = hasattr(model, "generation_config") and hasattr(model, "generate")
    outside = ("hooks", *["kv_cache", "speculate"] * generates)
    session = find_or_make(
        model, parsed, None, lambda: make_session(model, parsed, outside=outside)
    )
    model.compile(backend="sits", options=given)
    ordinary: Any = model._compiled_call_impl
    model._compiled_call_impl = Dispatcher(model, session, ordinary)
    wanted = session.recipe.kv_cache
    if generates and fixed_cache.install(model, wanted):
        kind = "a static cache" if wanted is None else f"a QuantizedKVCache, {wanted.policy}"
        why = "its shapes do not change from token to token"
        session.record.effective.append(Effective("generate()", kind, why))
    if generates:
        _speculate(model, session, given)
        speculation = session.extra["speculation"]
        loop = generating.install(model, session.record, speculation)
        if speculation is not None:
            session.extra.setdefault("guard_steps", {})["speculation"] = Step(
                "speculation", loop.plain
            )
    hooked.install(model, session)
    return model
