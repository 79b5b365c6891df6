"""How much of a step runs inside regions, and why the rest does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..graph.regions.plan import Outside, RegionPlan
from .record import GraphRecord

BREAK = "graph break"


@dataclass(frozen=True)
class Reason:
    """Kernels that are in no region for one reason: `source` is `file:line` of the model. module: of the first."""

    reason: str
    op: str
    source: str
    module: str
    count: int = 1

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        place = ", ".join(filter(None, (self.module, self.source)))
        return f"{times}{self.op} ({place}): {self.reason}" if place else f"{times}{self.op}: {self.reason}"  # fmt: skip


@dataclass
class Coverage:
    """One step: kernels and predicted microseconds inside regions and in all (None where unknown). fits: whether the
    rule is meant for it; whole: a graph that was not planned at all, with why."""

    step: str
    rule: str = ""
    kernels_inside: int = 0
    kernels: int = 0
    us_inside: float | None = 0.0
    us: float | None = 0.0
    saved_us: float | None = 0.0
    regions: int = 0
    fits: bool = True
    refused: str = ""
    reasons: list[Reason] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of kernels, from 0 to 1."""
        return self.kernels_inside / self.kernels if self.kernels else 0.0

    @property
    def time_share(self) -> float | None:
        """Of predicted time, from 0 to 1."""
        if self.us is None or self.us_inside is None or not self.us:
            return None
        return self.us_inside / self.us

    def add(self, plan: RegionPlan) -> None:
        """Count one graph of the step."""
        inside, total = plan.kernels
        us_inside, us = plan.times
        self.rule, self.fits, self.refused = plan.rule, plan.fits, self.refused or plan.refused
        self.kernels_inside += inside
        self.kernels += total
        self.us_inside, self.us = _plus(self.us_inside, us_inside), _plus(self.us, us)
        for region in plan.regions:
            self.saved_us = _plus(self.saved_us, region.saved_us)
        self.regions += len(plan.regions)
        self.reasons += reasons(plan.outside)


def coverage(graphs: Iterable[GraphRecord]) -> list[Coverage]:
    """By step, over the graphs that regions were planned for; a graph break between two of them counts as a kernel
    outside, since the host waits there."""
    found: dict[str, Coverage] = {}
    for graph in graphs:
        if graph.regions is None:
            continue
        step = found.setdefault(graph.name.split("/")[0], Coverage(graph.name.split("/")[0]))
        step.add(graph.regions)
        if graph.broken:
            step.kernels += 1
            step.reasons.append(Reason(f"{BREAK}: {graph.broken}", "python", graph.broken_at, ""))
    return list(found.values())


def reasons(outside: Iterable[Outside]) -> list[Reason]:
    """Each reason at each place of the model once, kernels only, in the order of the graph."""
    found: dict[tuple[str, str, str], list[Outside]] = {}
    for one in outside:
        if one.kernel:
            found.setdefault((one.reason, one.op, one.source), []).append(one)
    return [
        Reason(why, op, source, group[0].module, len(group))
        for (why, op, source), group in found.items()
    ]


def too_little(graphs: Iterable[GraphRecord], require: float) -> list[str]:
    """What to tell of every step whose share of kernels inside regions is below `require`."""
    lines = []
    for step in coverage(graphs):
        if step.fits and step.share < require:
            told = f"{step.kernels_inside} of {step.kernels} kernels of {step.step} are in regions ({step.share:.1%}), {require:.1%} are required"  # fmt: skip
            lines.append("\n  outside: ".join([told, *map(str, step.reasons)]))
    return lines


def _plus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b
