"""Trace a model's typical calls and rewrite their graphs, without compiling or running anything.

Works on the meta device, so that a model of any size is explained from its config alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ..graph.capture import CannotCapture
from ..graph.repeat import equal_layers
from ..options import Options
from ..pipeline import fallback_effects, records_gradients, rewritten
from ..planning import ExpectationError, check_expectations, check_regions, make_session
from ..reporting import Report, of_sessions
from ..rewrite.record import GraphRecord
from ..runtime.capture.choose import plan_for
from ..runtime.choose import foreseen
from ..runtime.lower import choose_kernels
from ..runtime.machine import detect_target
from ..runtime.triton.choose import on_paper
from ..session import Session, ends_the_call
from ..spec.locate import rule_dirs
from ..spec.region import RegionFile, load_regions
from ..spec.target import Target
from .steps import Step, steps


class _Traced(Exception):
    """A call has been traced to its end; there is no need to run it."""


def explain(
    model: nn.Module,
    options: Options,
    graphs: Sequence[str] = (),
    inputs: Any = None,
    say: Callable[[str], object] = lambda text: None,
    kernel: Callable[[Node], tuple[str, str]] | None = None,
) -> tuple[Report, ExpectationError | None]:
    """What the options do to a model, and the expectations of its recipe that are not met.

    `graphs` picks steps by name (decode, prefill, forward); `inputs` are for a model that says nothing of its own;
    `say` hears what is going on; `kernel` says by whom a node is lowered, and why.
    Raises SpecError for options, and for a model whose inputs are not known.
    """
    session = make_session(model, replace(options, explain=True), outside=["kv_cache"])
    if options.target == "auto":
        session.target = session.plan.target = detect_target(measure=True)
    session.extra["kernel"] = kernel or _on(session.target)
    calls = steps(model, graphs, inputs, session.recipe.kv_cache)
    torch._dynamo.reset()
    try:
        for step in calls:
            say(f"tracing {step.name}")
            trace(model, step, session)
    finally:
        torch._dynamo.reset()
    report = of_sessions([session], model)
    try:
        check_expectations(session)
        check_regions(session)
    except ExpectationError as error:
        return report, error
    return report, None


def trace(model: nn.Module, step: Step, session: Session) -> None:
    """Rewrite the graphs of one call; they join the session's record. So does a call that cannot be traced, with
    why; under `strict` it raises."""
    compiled = torch.compile(model, backend=_backend(step.name, session), dynamic=False)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            compiled(*step.args, **step.kwargs)
    except _Traced:
        pass
    except Exception as error:
        if session.options.strict:
            raise
        first = str(error).strip().split("\n")[0]
        why = f"its call could not be traced to the end: {type(error).__name__}: {first}"
        session.record.graphs.append(GraphRecord(f"{step.name} (failed)", fallback=why))


def _backend(name: str, session: Session) -> Callable[..., Any]:
    count = 0

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal count
        record = GraphRecord(f"{name}/{count}" if count else name)
        count += 1
        session.record.graphs.append(record)
        record.broken, record.broken_at = why_broken(gm)
        rewrite_one(gm, inputs, session, record)
        return _stop if ends_the_call(gm) else gm.forward

    return backend


def why_broken(gm: GraphModule) -> tuple[str, str]:
    """Why a graph ends before its call does, and `file:line` of that; empty for one that does not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return "", ""
    frames = list(reason.user_stack or ())
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return str(reason.reason).strip().split("\n")[0], where


def _stop(*args: Any) -> Any:
    raise _Traced


def rewrite_one(
    gm: GraphModule, inputs: Sequence[Any], session: Session, record: GraphRecord
) -> None:
    """Capture, rewrite and choose kernels for one graph; a graph that cannot be captured is recorded as such."""
    record.grad = records_gradients(gm, inputs)
    record.dynamic = any(isinstance(i, torch.SymInt) for i in inputs)
    try:
        captured, applied = rewritten(gm, inputs, session.plan, record)
    except CannotCapture as reason:
        record.fallback = str(reason)
        session.record.effective.extend(fallback_effects(record))
        return
    if session.plan.lowering.repeat and not record.grad:
        record.repeated = equal_layers(captured.gm.graph)
    choose_kernels(captured, applied, session.plan.lowering, session.extra.get("kernel"))
    if session.target.emitter == "triton":
        record.regions = plan_for(
            captured, session.plan.regions or _by_default(session), session.target
        )


def _by_default(session: Session) -> list[RegionFile]:
    """The rules that are shown where the recipe names none."""
    return list(load_regions(rule_dirs(session.options.path)).values())[:1]


def _on(target: Target) -> Callable[[Node], tuple[str, str]]:
    """Who lowers a node on a target, as far as facts tell without building anything."""
    if target.emitter == "triton":
        return on_paper(target)

    def kernel(node: Node) -> tuple[str, str]:
        exists, why = foreseen(node)
        return ("cpp" if exists else "inductor"), why

    return kernel
