"""The order of rules: stages as listed here, inside a stage what `after` and `overrides` say, then by id."""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter

from ..spec.errors import SpecError
from ..spec.rule import Rule

STAGES = ("clean", "recompose", "fold", "layout", "fuse", "attention", "weights")


def stage_rank(stage: str) -> int:
    """Stages that users add run last, in alphabetical order among themselves."""
    return STAGES.index(stage) if stage in STAGES else len(STAGES)


def ordered(rules: Iterable[Rule]) -> list[Rule]:
    """Rules in the order they run. Raises SpecError for a cycle, at the first rule in it."""
    by_id = {r.id: r for r in rules}
    before: dict[str, set[str]] = {i: set() for i in by_id}
    for rule in by_id.values():
        before[rule.id].update(i for i in rule.after if i in by_id)
        for other in rule.overrides:
            if other in by_id:
                before[other].add(rule.id)
    sorter = TopologicalSorter(before)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = error.args[1]
        raise SpecError(
            by_id[cycle[0]].pos, f"the order of rules has a cycle: {' -> '.join(cycle)}",
            hint="drop one `after` or `overrides` of these",
        ) from None  # fmt: skip
    out: list[Rule] = []
    ready: list[str] = []
    while sorter.is_active():
        ready += sorter.get_ready()
        ready.sort(key=lambda i: (stage_rank(by_id[i].stage), by_id[i].stage, i))
        chosen = ready.pop(0)
        out.append(by_id[chosen])
        sorter.done(chosen)
    return out
