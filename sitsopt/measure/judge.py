"""Judges the regions of a model's typical steps by running them:  python -m sitsopt.measure.judge MODEL [TARGET]

Each graph is captured, rewritten and planned for the target as `explain` does it, then run twice on this machine in the
plan's order, watched by a judge that does not know the plan (`runtime/capture/judge.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ..graph.capture import restore
from ..graph.regions.check import check
from ..graph.regions.plan import RegionPlan
from ..graph.regions.planner import plan_regions
from ..options import Options
from ..pipeline import rewritten
from ..planning import make_session
from ..rewrite.record import GraphRecord
from ..runtime.capture.choose import stays
from ..runtime.capture.costs import costs_of
from ..runtime.capture.judge import Verdict, judge
from ..runtime.capture.replay import run_planned
from ..session import ends_the_call
from ..spec.locate import rule_dirs
from ..spec.region import RegionFile, load_regions
from .explain import _stop, _Traced
from .steps import steps


@dataclass
class Judged:
    """One graph: its plan, what the checker says of it, what the judge saw, and how far the results of the plan's
    order are from those of the graph's."""

    graph: str
    plan: RegionPlan
    problems: list[str]
    verdict: Verdict
    max_abs: float


def judged(model: nn.Module, options: Options, graphs: Sequence[str] = (), inputs: Any = None) -> list[Judged]:  # fmt: skip
    """Every graph of a model's steps, planned by the recipe's region rules (`decode` where it names none) and run."""
    session = make_session(model, options, outside=["kv_cache", "hooks"])
    rules = session.plan.regions or tuple(load_regions(rule_dirs(options.path)).values())[:1]
    found: list[Judged] = []
    for step in steps(model, graphs, inputs):
        names = iter(range(1000))

        def backend(gm: GraphModule, given: Sequence[Any], name: str = step.name, names: Any = names) -> Any:  # fmt: skip
            count = next(names)
            found.append(one(gm, given, session, rules[0], f"{name}/{count}" if count else name))
            return _stop if ends_the_call(gm) else gm.forward

        torch._dynamo.reset()
        try:
            with torch.no_grad():
                torch.compile(model, backend=backend, dynamic=False)(*step.args, **step.kwargs)
        except _Traced:
            pass
        finally:
            torch._dynamo.reset()
    return found


def one(gm: GraphModule, inputs: Sequence[Any], session: Any, rule: RegionFile, name: str) -> Judged:  # fmt: skip
    """Plan, check, run and judge one graph of Dynamo's."""
    captured, _ = rewritten(gm, inputs, session.plan, GraphRecord(name))
    held = stays(captured)
    restore(captured)
    captured.gm.recompile()
    graph = captured.gm.graph
    plan = plan_regions(graph, rule, costs_of(session.target, rule), held=held)
    problems = check(plan, graph, rule, held=held)
    if not plan.regions:
        return Judged(name, plan, problems, Verdict([]), 0.0)

    def run(*given: Any) -> Any:
        return run_planned(captured.gm, plan, given)

    wanted, got = _results(captured.inputs, captured.gm), _results(captured.inputs, run)
    apart = [float((a.double() - b.double()).abs().max()) for a, b in zip(wanted, got, strict=True) if a.numel()]  # fmt: skip
    changing = [v for v in captured.inputs if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter)]  # fmt: skip
    before = [v.clone() for v in changing]

    def prepare() -> None:
        for value, old in zip(changing, before, strict=True):
            value.copy_(old)

    verdict = judge(lambda: run(*captured.inputs), prepare)
    prepare()
    return Judged(name, plan, problems, verdict, max(apart, default=0.0))


def _results(inputs: Sequence[Any], run: Any) -> list[torch.Tensor]:
    """The results of a run on copies of whatever is no parameter, and these as the run left them."""
    copies = [v.clone() if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter) else v for v in inputs]  # fmt: skip
    with torch.no_grad():
        results = [r for r in run(*copies) if isinstance(r, torch.Tensor)]
    return results + [c for c in copies if isinstance(c, torch.Tensor) and not isinstance(c, nn.Parameter)]  # fmt: skip


def main(model: str, target: str = "h100") -> int:
    """Print what was found; 1 when anything speaks against a replay."""
    from .models import load

    loaded = load(model)
    bad = False
    for each in judged(loaded.model, Options.parse({"target": target}), inputs=loaded.inputs):
        inside, total = each.plan.kernels
        print(f"{each.graph}: {inside} of {total} kernels in {len(each.plan.regions)} regions; {sum(each.verdict.spans.values())} ops judged, max abs {each.max_abs:g}; {each.plan.refused}")  # fmt: skip
        for line in [*each.problems, *map(str, each.verdict.hazards)]:
            print(f"  {line}")
        bad |= bool(each.plan.regions and (each.problems or each.verdict.hazards))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
