"""The stages in order, each recorded: capture, rewrite, lower, compile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from .graph import ops as _reference_ops  # noqa: F401  registers the sits:: ops
from .graph.capture import CannotCapture, Captured, OnlyEager, capture
from .graph.pause import collection_paused
from .graph.released import is_released
from .rewrite.engine import Applied, Settings, rewrite
from .rewrite.record import Effective, GraphRecord
from .rewrite.view import GraphView
from .rewrite.wanted import WantedWeights, swap
from .runtime.capture.lowered import plan_captures
from .runtime.lower import Lowering, choose_kernels, compile_graph, compile_whole, finish
from .runtime.product import Product
from .runtime.strides import keep_strides
from .runtime.triton.choose import NO_TEXT
from .runtime.weights import note_errors
from .runtime.writes import Sharing, rough_writes
from .spec.region import RegionFile
from .spec.rule import Rule
from .spec.target import Target
from .stages import counted, tell


class LoweringError(RuntimeError):
    """`strict: true` and a graph, or a rewrite in it, could not be lowered."""


@dataclass
class Plan:
    """What to do with each graph of a model: rules in order, target facts, how to lower."""

    rules: list[Rule]
    facts: dict[str, Any] = field(default_factory=dict)
    lowering: Lowering = field(default_factory=Lowering)
    strict: bool = False
    misses: bool = False
    allow: Callable[[str], bool] = lambda site: True
    target: Target | None = None  # to predict times for
    weights: WantedWeights | None = None
    regions: tuple[RegionFile, ...] = ()  # region rules, in the recipe's order


def process(gm: GraphModule, inputs: Sequence[Any], plan: Plan, record: GraphRecord) -> Product:
    """One graph of Dynamo's, compiled.

    Raises LoweringError under `strict`; otherwise whatever fails is undone, noted in the record, and Inductor gets
    the graph as it came.
    """
    record.grad = records_gradients(gm, inputs)
    record.dynamic = any(isinstance(i, torch.SymInt) for i in inputs)
    reason = ""
    for repeat in (plan.lowering.repeat and not record.grad, False):
        try:
            return _compiled(gm, inputs, plan, record, repeat)
        except OnlyEager as error:
            return _fall_back(
                gm, inputs, replace(plan, lowering=Lowering("eager")), record, str(error)
            )
        except CannotCapture as error:
            return _fall_back(gm, inputs, plan, record, str(error))
        except (torch._dynamo.exc.TorchDynamoException, LoweringError):
            raise
        except Exception as error:
            reason = f"lowering failed: {type(error).__name__}: {error}"
            if not repeat:
                break
            record.repeat_failed = reason
            record.forget_rewrites()
    for site in record.sites:
        site.lowered, site.lowered_why = "undone", "lowering of its graph failed"
    return _fall_back(gm, inputs, plan, record, reason)


def _compiled(
    gm: GraphModule, inputs: Sequence[Any], plan: Plan, record: GraphRecord, repeat: bool
) -> Product:
    captured, applied = rewritten(gm, inputs, plan, record)
    start = time.perf_counter()
    lowering = replace(plan.lowering, grad=record.grad, repeat=repeat)
    choose_kernels(captured, applied, lowering)
    if not lowering.compiles:
        keep_strides(captured, gm)
    if plan.strict and (missing := without_text(record, plan)):
        raise LoweringError("; ".join(f"{m.asked}: {m.reason}" for m in missing))
    captures = plan_captures(captured, plan.regions, plan.target, lowering, record)
    if captures is not None and not captures.whole:
        lowering = replace(lowering, repeat=False)
    finished = finish(captured, lowering)
    _refuse_released(finished.values, "they are read as they are")
    note_errors(applied, finished.hoisted)
    record.repeated = finished.repeated
    tell(record.name, "compile", _what_to_compile(record))
    program = captures.program(finished, lowering) if captures is not None else None
    compiled, record.one_function = compile_whole(
        finished.gm,
        finished.values,
        lowering,
        lambda: program or compile_graph(finished.gm, finished.values, lowering),
    )
    record.compile_ms = (time.perf_counter() - start) * 1e3
    tell(record.name, "ready", f"compiled in {record.compile_ms / 1e3:.1f} s")
    product = finished.product(compiled, len(inputs))
    if captures is not None and captures.whole:
        product.limits, product.notes = captures.limits(finished), record.capture_notes
    if captured.written:
        fixed = all(isinstance(i, torch.Tensor) for i in inputs)  # a size that changes is an input
        product.sharing, product.otherwise = Sharing(inputs, fixed), gm.forward
    return product


def _refuse_released(values: Sequence[Any], why: str) -> None:
    if any(map(is_released, values)):
        what = "this call needs weights that `release: true` has given back"
        raise LoweringError(f"{what}: sitsopt.restore(model) brings them back ({why})")


def rewritten(
    gm: GraphModule, inputs: Sequence[Any], plan: Plan, record: GraphRecord
) -> tuple[Captured, list[Applied]]:
    """Capture a graph and apply the rules to it. Raises CannotCapture."""
    with collection_paused():
        captured, applied, view = capture_and_rewrite(gm, inputs, plan, record)
        start = time.perf_counter()
        view.sweep()
        record.nodes_after = _ops(captured)
        record.rewrite_ms += (time.perf_counter() - start) * 1e3
    return captured, applied


def capture_and_rewrite(
    gm: GraphModule, inputs: Sequence[Any], plan: Plan, record: GraphRecord
) -> tuple[Captured, list[Applied], GraphView]:
    """The same, with the replaced nodes still in the graph: for `undo` and for comparing both sides."""
    start = time.perf_counter()
    tell(record.name, "capture", counted(len(gm.graph.nodes), "node"))
    with collection_paused():
        captured = capture(gm, inputs)
        record.nodes_before = _ops(captured)
        record.capture_ms = (time.perf_counter() - start) * 1e3
        start = time.perf_counter()
        tell(record.name, "rewrite", counted(record.nodes_before, "op"))
        settings = Settings(record.grad, plan.facts, plan.allow, plan.misses, plan.target)
        view = GraphView(captured.gm, captured.params, captured.written)
        swaps = [r for r in plan.rules if r.stage == "weights"]
        rules = [r for r in plan.rules if r.stage != "weights"]
        applied = rewrite(view, rules, settings, record)
        if plan.weights is not None:
            applied = swap(view, plan.weights, captured, swaps, applied, settings, record)
        record.rewrite_ms = (time.perf_counter() - start) * 1e3
    return captured, applied, view


def _what_to_compile(record: GraphRecord) -> str:
    same = [f"{len(layers)} layers as one" for layers in record.repeated]
    return ", ".join([counted(len(record.sites), "rewrite"), *same])


def _ops(captured: Captured) -> int:
    return sum(n.op == "call_function" for n in captured.gm.graph.nodes)


def records_gradients(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a backward pass may follow: then only rules marked `grad: safe` apply. A graph may switch gradients
    on by itself; its results tell."""
    results = [n.meta.get("example_value") for n in gm.graph.output_node().all_input_nodes]
    if torch.is_grad_enabled():
        results += [*inputs, *gm.parameters()]
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in results)


def _fall_back(
    gm: GraphModule, inputs: Sequence[Any], plan: Plan, record: GraphRecord, reason: str
) -> Product:
    _refuse_released(inputs, reason)
    record.fallback = reason
    tell(record.name, "fallback", reason)
    if plan.strict:
        raise LoweringError(f"graph {record.name}: {reason}")
    lowering = plan.lowering
    if lowering.how != "eager" and rough_writes(gm):
        record.fallback += "; it runs without a compiler, as it writes to its inputs"
        lowering = Lowering("eager")
    everything, compiled = list(range(len(inputs))), gm.forward
    try:
        compiled = compile_graph(gm, list(inputs), lowering)
    except torch._dynamo.exc.TorchDynamoException:
        raise
    except Exception as error:
        record.fallback += f"; it runs without a compiler: {type(error).__name__}: {error}"
    return Product(compiled, everything, len(inputs))


def without_text(record: GraphRecord, plan: Plan) -> list[Effective]:
    """Under `lowering: interpret`, the sites that have no generated text, as lines under `effective`."""
    if plan.lowering.how != "interpret":
        return []
    emitting = {rule.id for rule in plan.rules if rule.emit}
    counts = Counter(
        (site.rule, site.lowered_why) for site in record.sites
        if site.lowered_why and site.lowered != "interpret"
        and (site.rule in emitting or site.lowered_why != NO_TEXT)
    )  # fmt: skip
    return [
        Effective(f"lowering: interpret at {count} of {rule} in {record.name}", "eager", why)
        for (rule, why), count in counts.items()
    ]


def region_effects(record: GraphRecord) -> list[Effective]:
    """What spoke against capturing a graph's regions, as lines under `effective`."""
    return [Effective(f"regions of {record.name}", "op by op", note) for note in record.capture_notes]  # fmt: skip


def fallback_effects(record: GraphRecord) -> list[Effective]:
    """A graph that was not rewritten, as a line under `effective`."""
    left = [
        Effective(f"weights: {module}", "as it is", why)
        for module, why in record.left_weights.items()
    ]
    if not record.fallback:
        return left
    return [
        *left,
        Effective(f"rewrite graph {record.name}", "Inductor's own code", record.fallback),
    ]
