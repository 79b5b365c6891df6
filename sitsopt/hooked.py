"""The hooks of an optimized model's recipe: applied with `optimize`, taken back with the model, at the end of the
process, or when the model is optimized anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from .dispatch.dispatcher import Dispatcher
from .rewrite.record import Effective
from .runtime.hooks import Run, Wanted, plan_hooks
from .runtime.hooks.guard import Guard
from .runtime.hooks.smaller import shrink_cache
from .runtime.hooks.stepdown import Call, Step, release_pools
from .session import Session

_RUNS: weakref.WeakKeyDictionary[nn.Module, Run] = weakref.WeakKeyDictionary()
PREFILL = 512  # tokens of the larger all-reduce that is planned for


def hooks_of(model: nn.Module) -> Run | None:
    """The hooks that run for an optimized model: facts, plans, what was applied and refused; None without any."""
    return _RUNS.get(model)


def install(model: nn.Module, session: Session) -> Run | None:
    """Plan and apply what the session's recipe asks for; what came of it stands under `effective`."""
    if (before := _RUNS.pop(model, None)) is not None:
        before.revert()
    sections = session.recipe.hooks.sections()
    if not sections:
        return None
    run = plan_hooks(sections, wanted(model, session.target, measure=True)).apply()
    _RUNS[model] = run
    weakref.finalize(model, run.ledger.revert)
    guard = run.hooks.get("guard")
    if isinstance(guard, Guard) and guard.applied:
        inner: Any = model._compiled_call_impl
        model._compiled_call_impl = guard.around(inner, _steps(model, session, inner))
    session.record.effective.extend(effective(run))
    return run


def wanted(model: nn.Module | None, target: Any = None, measure: bool = False) -> Wanted:
    """What hooks are told of a model: its weights, and the all-reduces of a decode step and a prefill."""
    if model is None:
        return Wanted(target=target, measure=measure)
    weights = dict(model.named_parameters())
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    item = max((w.element_size() for w in weights.values() if w.is_floating_point()), default=4)
    sizes = (width * item, width * item * PREFILL) if isinstance(width, int) else ()
    return Wanted(target=target, message_bytes=sizes, weights=weights, measure=measure)


def effective(run: Run) -> list[Effective]:
    """What was asked of each hook and what came of it."""
    refused: dict[str, list[str]] = {}
    for name, each in run.refused():
        refused.setdefault(name, []).append(f"{each.what}: {each.why}")
    found = []
    for name in [*run.plans, *run.failed]:
        done = [f"{a.key} = {a.after}" for a in run.ledger.applied if a.hook == name]
        if name == "guard" and run.applying.get(name):
            done.append("watches every call")
        got = ", ".join(done) or ("planned only" if run.applying.get(name) is False else "nothing")
        reason = "; ".join(refused.get(name, ())) or "as planned"
        found.append(Effective(f"hooks: {name}", got, reason))
    return found


def _steps(model: nn.Module, session: Session, inner: Any) -> Mapping[str, Step]:
    """The steps down that this model has; other parts add theirs under `guard_steps` of the session."""
    released = any(weight.release for weight in session.recipe.weights)
    left = [False]

    def leave(call: Call) -> str:
        count = len(inner.entries) if isinstance(inner, Dispatcher) else 0
        if isinstance(inner, Dispatcher):
            inner.entries = []
        left[0] = True
        gc.collect()
        said = f"{count} compiled calls and the weights packed for them let go; ops run one by one"
        return f"{said}; {release_pools(call)}"

    def needed(call: Call) -> str:
        return "the full-precision weights were released" if released else ""

    def plain(call: Call) -> str:
        if released:
            return needed(call)
        return "the model's own weights are in use since the graphs were left" if left[0] else ""

    eager = model._call_impl
    own = {
        "cache": shrink_cache(eager),
        "graphs": Step("graphs", leave, needed, eager),
        "plain": Step("plain", leave, plain, eager),
    }
    return {**own, **session.extra.get("guard_steps", {})}
