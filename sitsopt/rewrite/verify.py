"""A rule's examples executed: it fires where it says, skips for the reason it says, and is right within tolerance."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..graph.facts import DTYPE_NAMES, tensor
from ..spec.rule import Example, Rule
from . import oracle
from .engine import Applied, Settings, rewrite
from .example import Case, build
from .record import GraphRecord


@dataclass(frozen=True)
class Failure:
    """One example that did not go as the rule says."""

    rule: str
    place: str
    what: str

    def as_dict(self) -> dict[str, str]:
        return {"rule": self.rule, "place": self.place, "what": self.what}


def verify(rule: Rule, subject: Rule | None = None, first: bool = False) -> list[Failure]:
    """Run every example of `rule`, matched by `subject` (a mutant) or by the rule itself. `first`: one failure is
    enough."""
    failures = []
    for example in rule.examples:
        spellings = example.spellings(rule)
        for spelling in spellings if example.given is None else spellings[:1]:
            what = _example(rule, subject or rule, spelling, example)
            if what:
                failures.append(
                    Failure(rule.id, str(example.pos), f"{what} (spelling {spelling + 1})")
                )
                if first:
                    return failures
    return failures


def _example(rule: Rule, subject: Rule, spelling: int, example: Example) -> str:
    try:
        case = build(rule, spelling, example)
        before = copy.deepcopy(case.gm)
    except Exception as error:
        return f"the example cannot be built: {type(error).__name__}: {error}"
    record = GraphRecord("example")
    settings = Settings(
        example.grad or example.because == "grad", dict(example.target), misses=True
    )
    try:
        applied = rewrite(case.view, [subject], settings, record)
    except Exception as error:
        return f"the rewrite raised {type(error).__name__}: {error}"
    if not example.fires:
        return _skipped(example, record)
    if not applied:
        closest = max(record.misses, key=lambda m: m.matched, default=None)
        why = f": {closest.reason}, {closest.condition}: expected {closest.expected}, found {closest.found}" if (
            closest) else ""  # fmt: skip
        return f"does not fire{why}"
    return _right(subject, before, case, applied)


def _skipped(example: Example, record: GraphRecord) -> str:
    if record.sites:
        return "fires, but should be skipped"
    reasons = {m.reason for m in record.misses} | {m.condition for m in record.misses}
    if example.because not in reasons and not (example.because == "pattern" and not record.misses):
        closest = max(record.misses, key=lambda m: m.matched, default=None)
        found = (
            f"{closest.reason} ({closest.condition})"
            if closest
            else "the pattern did not begin to match"
        )
        return f"is skipped for another reason than `{example.because}`: {found}"
    return ""


def _right(rule: Rule, before: Any, case: Case, applied: Sequence[Applied]) -> str:
    if rule.replace is None:
        return ""  # a claim leaves the graph as it is
    case.view.sweep()
    case.gm.graph.lint()
    case.gm.recompile()
    try:
        eager, got = oracle.run(before, case.inputs), oracle.run(case.gm, case.inputs)
        wide = oracle.run_wide(before, case.inputs)
    except Exception as error:
        return f"the graph raised {type(error).__name__}: {error}"
    verdict = oracle.compare(eager, got, wide, tolerance(rule, applied[0]))
    return "" if verdict.right else verdict.why


def tolerance(rule: Rule, applied: Applied) -> tuple[float, float] | None:
    """(rtol, atol) of a rule for the dtype its first floating output has; None means bitwise."""
    for node in applied.match.returns:
        value = tensor(node)
        if value is not None and value.is_floating_point():
            own = rule.tolerance.get(DTYPE_NAMES[value.dtype])
            return (own.rtol, own.atol) if own else None
    return None
