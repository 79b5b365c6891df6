"""The hook `cpu`: threads, affinity, huge pages, denormals, allocator. What can be measured is measured, in turns
with the settings as they are, and stays only when it is faster; the rest is advice."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from .facts import Facts
from .host import Host, as_cpu_list
from .ledger import Ledger
from .plan import Action, Plan, Settings, Wanted

BUDGET_S = 0.8  # for all candidates together
GAIN = 0.97  # of the time with the settings as they are: less of a gain is noise
BYTES = 96 << 20  # of weights that one pass reads: more than caches hold
ROUNDS = 3  # at least
SAMPLE = 4096  # numbers looked at in a weight
TINY = 2.0**-126  # the smallest normal number of f32 and bf16


@dataclass(frozen=True)
class Measured:
    """Medians in milliseconds over turns, and how often the candidate was the faster of two neighbours."""

    candidate: str
    ms: float
    default_ms: float
    faster: int
    turns: int

    @property
    def pays(self) -> bool:
        return self.ms <= GAIN * self.default_ms and 3 * self.faster >= 2 * self.turns


class Cpu(Settings):
    """`workload` runs once what the settings shall make fast; without one, products of one row with the model's
    own weights (or some of a size that no cache holds) stand in for decoding."""

    name = "cpu"
    after = ("hbm",)

    def __init__(self, workload: Callable[[], Any] | None = None) -> None:
        self.workload = workload

    def plan(self, facts: Facts, wanted: Wanted) -> Plan:
        plan = Plan(self.name)
        self._start_only(plan, facts)
        candidates = self._candidates(plan, facts) + self._denormals(plan, wanted)
        if not candidates:
            return plan
        if not wanted.measure or "torch" not in sys.modules:
            for action in candidates:
                plan.refuse(
                    f"{action.key} = {action.value}", "not measured, so not known to be faster"
                )
            return plan
        workload = self.workload or decode_like(wanted.weights)
        measured = compare(candidates, workload)
        plan.data["measured"] = [vars(each) for each in measured]
        best = min((m for m in measured if m.pays), key=lambda m: m.ms / m.default_ms, default=None)
        for action, result in zip(candidates, measured, strict=True):
            said = f"{result.ms:.2f} ms against {result.default_ms:.2f} as it is, faster in {result.faster} of {result.turns}"
            if result is best:
                plan.actions.append(
                    Action(
                        action.key, action.value, f"{action.why}: {said}", because=action.because
                    )
                )
            else:
                plan.refuse(f"{action.key} = {action.value}", f"no faster as measured: {said}")
        return plan

    def _candidates(self, plan: Plan, facts: Facts) -> list[Action]:
        cpus, cores, quota = facts["cpu.allowed"], facts["cpu.cores"], facts["cpu.quota"]
        found: list[Action] = []
        if facts["env.OMP_NUM_THREADS"] is not None:
            plan.refuse("threads", f"OMP_NUM_THREADS says {facts['env.OMP_NUM_THREADS']}")
        else:
            now = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
            counts = {
                len(cores or ()): ("cpu.cores",),
                int(quota or 0): ("cpu.quota",),
                1: ("cpu.allowed",),
            }
            whys = {"cpu.cores": "one thread a core", "cpu.quota": "no more threads than the control group pays for",
                    "cpu.allowed": "one thread: no barriers"}  # fmt: skip
            for count, because in sorted(counts.items(), reverse=True):
                if count > 0 and count != now and (cpus is None or count <= len(cpus)):
                    found.append(Action("threads", count, whys[because[0]], because=because))
        if cores and cpus and len(cores) < len(cpus):
            first = [core[0] for core in cores]
            found.append(Action("affinity", first, "one CPU of each core", because=("cpu.cores",)))
        return found

    def _denormals(self, plan: Plan, wanted: Wanted) -> list[Action]:
        """Flushing them changes numbers, if only tiny ones: worth a try only where there are any."""
        share = denormal_share(wanted.weights)
        if share:
            why = f"{share:.2%} of the weights looked at are denormal, which many processors multiply slowly"
            return [Action("denormals", True, why)]
        plan.refuse(
            "flushing denormals",
            "the weights looked at hold none" if share == 0 else "no weights to look at",
        )
        return []

    def _start_only(self, plan: Plan, facts: Facts) -> None:
        if facts["pages.transparent"] == "madvise" and facts["env.THP_MEM_ALLOC_ENABLE"] is None:
            plan.actions.append(Action("env:THP_MEM_ALLOC_ENABLE", "1", "torch asks for huge pages only if told to, and"
                                       " the kernel gives them to who asks; not measured", "start", ("pages.transparent",)))  # fmt: skip
        elif facts["pages.transparent"] == "never":
            plan.refuse(
                "huge pages", "the kernel gives none (transparent_hugepage/enabled is never)"
            )
        preloaded = facts["env.LD_PRELOAD"] or ""
        if not any(name in preloaded for name in ("tcmalloc", "jemalloc", "mimalloc")):
            plan.advice.append("the allocator is the C library's; another one has to be preloaded (LD_PRELOAD) by who"
                               " starts the process, and was not measured here")  # fmt: skip
        if facts["env.OMP_PROC_BIND"] is None and facts["cpu.allowed"]:
            plan.data["cpus"] = as_cpu_list(facts["cpu.allowed"])


def denormal_share(weights: Mapping[str, Any]) -> float | None:
    """The share of denormal numbers in a sample of the weights on the CPU; None where there are none to look at."""
    denormal = total = 0
    for weight in weights.values():
        if weight.is_cpu and weight.is_floating_point() and weight.numel():
            flat = weight.detach().view(-1) if weight.is_contiguous() else weight.detach().flatten()
            sample = flat[:: max(1, flat.numel() // SAMPLE)].double().abs()
            # Products of narrow types are made in f32: what is normal there is no trouble.
            denormal += int(((sample > 0) & (sample < TINY)).sum())
            total += sample.numel()
    return denormal / total if total else None


def decode_like(weights: Mapping[str, Any]) -> Callable[[], Any]:
    """One row through two-dimensional weights in turn, 96 MB of them at most: what decoding does all the time."""
    import torch

    chosen, total = [], 0
    for weight in weights.values():
        if weight.dim() == 2 and weight.is_cpu and weight.is_floating_point() and total < BYTES:
            chosen.append(weight.detach())
            total += weight.nbytes
    if not chosen:
        chosen = [torch.full((1024, 1024), 0.01) for _ in range(BYTES >> 22)]
    rows = {(w.shape[1], w.dtype): torch.full((1, w.shape[1]), 0.01, dtype=w.dtype) for w in chosen}

    def run() -> None:
        with torch.inference_mode():
            for weight in chosen:
                torch.nn.functional.linear(rows[weight.shape[1], weight.dtype], weight)

    return run


def compare(
    candidates: list[Action], workload: Callable[[], Any], budget_s: float = BUDGET_S
) -> list[Measured]:
    """Each candidate in turns with the settings as they are. Everything is as before afterwards."""
    workload()
    share, found = budget_s / len(candidates), []
    for action in candidates:
        times: list[tuple[float, float]] = []
        start = time.perf_counter()
        while len(times) < ROUNDS or time.perf_counter() - start < share:
            plain = _timed(workload)
            with Ledger(Host()) as ledger:
                if not ledger.apply(action, "cpu"):
                    break
                workload()  # threads wake up, pages move
                times.append((_timed(workload), plain))
        if not times:
            found.append(Measured(f"{action.key} = {action.value}", 1.0, 0.0, 0, 0))
            continue
        ours, plains = zip(*times, strict=True)
        faster = sum(a < b for a, b in times)
        found.append(
            Measured(
                f"{action.key} = {action.value}", median(ours), median(plains), faster, len(times)
            )
        )
    return found


def _timed(workload: Callable[[], Any]) -> float:
    start = time.perf_counter()
    workload()
    return (time.perf_counter() - start) * 1000
