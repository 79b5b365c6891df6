"""One random program through the pipeline, against itself run by eager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from sitsopt.pipeline import Plan, process
from sitsopt.rewrite.record import GraphRecord
from sitsopt.runtime.lower import Lowering
from sitsopt.spec.rule import Rule
from tests.cases.harness import copies, outcome, sharing
from tests.fuzz.programs import Case, program

SLACK = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass
class Tally:
    """What came of a number of programs."""

    programs: int = 0
    raised: int = 0  # eager refuses the program
    rewritten: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def table(self, rules: Sequence[Rule]) -> str:
        lines = [f"{r.id:36} {self.fired[r.id]:6}" for r in rules]
        head = (
            f"{self.programs} programs, {self.rewritten} rewritten, {self.raised} refused by eager"
        )
        return "\n".join([head, *lines, *(f"{n:6} {why}" for why, n in self.fallbacks.items())])


def arguments(case: Case) -> list[object]:
    """Copies of a case's inputs, parameters as parameters."""
    made = copies(case.inputs)
    return [
        nn.Parameter(m, requires_grad=False) if isinstance(g, nn.Parameter) else m
        for m, g in zip(made, case.inputs, strict=True)
    ]


def differs(case: Case, rules: Sequence[Rule], lowering: str = "eager") -> tuple[str, GraphRecord]:
    """What differs from eager, "" when nothing does, and the record of the graph."""
    record = GraphRecord("fuzz")
    mine, theirs = arguments(case), arguments(case)
    with torch.no_grad():
        eager, refused = outcome(case.gm, mine)
        if refused is None and _values(eager, case.gm(*arguments(case)), True):
            refused = RuntimeError("eager reads what nobody wrote")
        if refused is not None:
            record.fallback = "refused by eager"
            return "", record
        plan = Plan(list(rules), facts={"channels_last": True}, lowering=Lowering(lowering))
        try:
            run = process(case.gm, theirs, plan, record).call()
            ours = run(*theirs)
            again = None if case.change and lowering == "eager" else run(*arguments(case))
        except Exception as error:
            return f"raised {type(error).__name__}: {error}", record
    exact = not record.sites and lowering == "eager"
    found = _values(eager, ours, exact) or _values(mine, theirs, exact, "input")
    if not found and again is not None:
        found = _values(eager, again, exact, "result of the second call")
    if not found and sharing(eager, mine) != sharing(ours, theirs):
        found = f"shares storage {sharing(ours, theirs)} instead of {sharing(eager, mine)}"
    return found, record


def _values(
    eager: Iterable[object], ours: Iterable[object], exact: bool, what: str = "result"
) -> str:
    eager, ours = list(eager), list(ours)
    if len(eager) != len(ours):
        return f"{len(ours)} {what}s instead of {len(eager)}"
    low = [t.dtype for t in eager if isinstance(t, torch.Tensor) and t.is_floating_point()]
    slack = max((SLACK[d] for d in low), default=1e-4)
    for i, (x, y) in enumerate(zip(eager, ours, strict=True)):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            if x != y:
                return f"{what} {i}: {y!r} instead of {x!r}"
            continue
        if x.dtype != y.dtype or x.shape != y.shape:
            return f"{what} {i}: {y.dtype}{tuple(y.shape)} instead of {x.dtype}{tuple(x.shape)}"
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return f"{what} {i}: {y} instead of {x}"
            continue
        bound = (
            0.0
            if exact
            else slack * max(1.0, float(x.abs().nan_to_num(0).max()) if x.numel() else 1.0)
        )
        if not torch.allclose(x.double(), y.double(), rtol=0.0, atol=bound, equal_nan=True):
            gap = float((x.double() - y.double()).abs().nan_to_num(float("inf")).max())
            return f"{what} {i}: off by {gap:.3g}, allowed is {bound:.3g}"
    return ""


def fuzz(
    seeds: Iterable[int], rules: Sequence[Rule], lowering: str = "eager", enough: int = 20
) -> Tally:
    """Programs of all the seeds; stops early after `enough` wrong ones."""
    tally = Tally()
    for seed in seeds:
        case = program(seed, rules)
        found, record = differs(case, rules, lowering)
        tally.programs += 1
        tally.raised += record.fallback == "refused by eager"
        tally.rewritten += bool(record.sites)
        tally.fired.update({s.rule for s in record.sites})
        if record.fallback:
            tally.fallbacks[record.fallback[:60]] += 1
        if found:
            fired = ", ".join(sorted({s.rule for s in record.sites}))
            tally.wrong.append(
                f"seed {seed}, {case.seeded or 'no rule'} {case.change}: {found} [{fired}]"
            )
            if len(tally.wrong) >= enough:
                break
    return tally


def merged(tallies: Iterable[Tally]) -> Tally:
    """Several tallies as one."""
    whole = Tally()
    for each in tallies:
        whole.programs += each.programs
        whole.raised += each.raised
        whole.rewritten += each.rewritten
        whole.fallbacks += each.fallbacks
        whole.fired += each.fired
        whole.wrong += each.wrong
    return whole
