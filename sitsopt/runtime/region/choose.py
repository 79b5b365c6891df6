"""Whether a graph runs as one generated function: where it can, and where that is the faster way as measured."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ...rewrite.record import OneFunction
from .. import stopwatch
from ..cachedir import root
from ..kernels.toolchain import BuildError
from ..triton.module import digest, write_whole
from .compiled import Region
from .plan import Planned, plan
from .scope import Unsupported

Compiled = Callable[..., Any]
OURS, THEIRS = "one function", "op by op"
VERSION = "1"  # of what is measured and how


def chosen(
    gm: GraphModule, values: Sequence[Any], profitability: str, op_by_op: Callable[[], Compiled]
) -> tuple[Compiled, OneFunction]:
    """The graph as a callable, and how it runs and why. values: its inputs; `op_by_op` compiles it the ordinary way,
    and is asked only where that is wanted or has to be measured."""
    try:
        planned = plan(gm)
        if profitability != "measure":
            return Region(planned), OneFunction(
                True, f"profitability: {profitability}", planned.ops
            )
        return _measured(planned, values, op_by_op)
    except (Unsupported, BuildError, OSError) as error:
        return op_by_op(), OneFunction(False, str(error))


def _measured(
    planned: Planned, values: Sequence[Any], op_by_op: Callable[[], Compiled]
) -> tuple[Compiled, OneFunction]:
    entry = root() / "profit" / f"region-{_key(planned)}.json"
    times = _held(entry)
    if times and times[OURS] > times[THEIRS]:
        return op_by_op(), _told(False, planned, times)
    region = Region(planned)
    if times:
        return region, _told(True, planned, times)
    if any(isinstance(v, torch._subclasses.FakeTensor) for v in values):
        return region, OneFunction(True, "not measured: its inputs have no values", planned.ops)
    other = op_by_op()
    times, steady = _race(region, other, values)
    if steady:
        with contextlib.suppress(OSError):
            write_whole(entry, json.dumps(times))
    used = times[OURS] <= times[THEIRS]
    return region if used else other, _told(used, planned, times)


def _told(used: bool, planned: Planned, times: dict[str, float]) -> OneFunction:
    why = "the faster way as measured" if used else "the slower way as measured"
    return OneFunction(used, why, planned.ops, times)


def _key(planned: Planned) -> str:
    facts = repr((planned.arguments, planned.pointers, platform.processor() or platform.machine()))
    return digest(planned.text, facts, str(torch.get_num_threads()), torch.__version__, VERSION)


def _held(entry: Any) -> dict[str, float]:
    try:
        found = json.loads(entry.read_text())
        return {name: float(found[name]) for name in (OURS, THEIRS)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _race(region: Region, other: Compiled, values: Sequence[Any]) -> tuple[dict[str, float], bool]:
    """Microseconds a call, and whether they are worth keeping. What the graph writes is written in copies; counters
    start anew at every call."""
    planned, args = region.planned, list(values)
    counters: list[tuple[torch.Tensor, torch.Tensor]] = []
    for place, (_, _, _, written) in zip(planned.places, planned.arguments, strict=False):
        if written:
            args[place] = values[place].detach().clone()
            if args[place].numel() <= 1:
                counters.append((args[place], values[place].detach()))

    def turn(call: Compiled) -> Callable[[], object]:
        def run() -> object:
            for counter, start in counters:
                counter.copy_(start)
            return call(*args)

        return run

    with torch.no_grad():
        ours, theirs = stopwatch.race([[turn(region)], [turn(other)]], "cpu")
    times = {OURS: round(ours.us, 1), THEIRS: round(theirs.us, 1)}
    return times, ours.steady and theirs.steady
