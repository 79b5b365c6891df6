"""`torch.compile(model, backend="sits")`: Dynamo's graph in, a callable out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder
from torch.fx import GraphModule

from . import generate
from .options import Options
from .pipeline import (
    LoweringError,
    Plan,
    fallback_effects,
    process,
    region_effects,
    rewritten,
    without_text,
)
from .planning import ExpectationError, check_expectations, check_once, make_session
from .rewrite.record import Effective, GraphRecord
from .runtime.product import Product
from .session import Session, ends_the_call, find_or_make, owner_of
from .spec.errors import SpecError

Compiled = Callable[..., Any]


def sits(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **unknown: Any,
) -> Compiled:
    """The Dynamo backend. `options` are those of `sitsopt.options.Options`; `mode` is passed on to Inductor.

    Bad options, unmet expectations and (under `strict`) failed lowerings raise at the call of the compiled
    function, as themselves rather than wrapped by Dynamo: SpecError, ExpectationError, LoweringError.
    """
    try:
        parsed = Options.parse(options)
        owner = owner_of(gm)
        session = find_or_make(
            owner, parsed, mode, lambda: make_session(owner, parsed, mode, unknown)
        )
        if session.plan.weights and session.plan.weights.stored:
            for_one_model(gm, inputs)
        if session.plan.weights and session.plan.weights.releasing:
            _keeps_originals(session)
        return compile_one(gm, inputs, session).call()
    except (SpecError, ExpectationError, LoweringError) as error:
        return raising(error)


def _keeps_originals(session: Session) -> None:
    why = "Dynamo dispatches this call, which reads every parameter: use sitsopt.optimize"
    said = Effective("weights: release", "the originals stay", why)
    if said not in session.record.effective:
        session.record.effective.append(said)


def for_one_model(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Guard the identity of a parameter: Dynamo reuses a graph for any model of the same structure, and another one
    comes from another file, or from none."""
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        source = getattr(node, "_dynamo_source", None)
        if isinstance(value, torch.nn.Parameter) and source is not None:
            context = torch._guards.TracingContext.get()
            context.guards_context.dynamo_guards.add(source.make_guard(GuardBuilder.ID_MATCH))
            return


def compile_one(
    gm: GraphModule, inputs: Sequence[Any], session: Session, whole: bool = False
) -> Product:
    """Compile one graph under its model's session and check expectations when the call is complete: `whole` says
    that this graph is all of it."""
    record = GraphRecord(name=f"graph{len(session.record.graphs)}")
    session.record.graphs.append(record)
    plan: Plan = session.plan
    product = process(gm, inputs, plan, record)
    lines = [*fallback_effects(record), *without_text(record, plan), *region_effects(record)]
    session.record.effective.extend(lines)
    if whole or ends_the_call(gm):
        try:
            check_once(session)
        except ExpectationError:
            if not plan.misses:  # once more, for the near misses that the message shows
                again = GraphRecord(record.name)
                rewritten(gm, inputs, replace(plan, misses=True), again)
                record.misses, record.tried = again.misses, again.tried
            check_expectations(session)
    return product


def raising(error: Exception) -> Compiled:
    """A callable that raises; Dynamo would otherwise wrap what its backend raises."""

    def fail(*args: Any) -> Any:
        raise error

    return fail


generate.install(sits)
