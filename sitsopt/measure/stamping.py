"""What compiling a repeated layer once costs at run time: decoding with it against decoding without it.

    python -m sitsopt.measure.stamping [MODEL] [--json] [--rounds 9]

One decode step of a language model, compiled twice in one process: with the repeated layers handed to Inductor once, and
with every layer in full. Each has compile caches of its own, so that both compile times are cold ones. Alternated; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..runtime import lower
from ..whole import compiled_call
from .decode import Decoder
from .models import load

STEPS = 40  # of one case in a row, from an empty cache


class Case:
    """A compiled decode step with a cache of its own."""

    def __init__(self, model: nn.Module, stamped: bool) -> None:
        self.decoder = Decoder(model, model, STEPS + 8)
        self.call = compiled_call(model, {}, dynamic=False)
        with _fresh_caches(), _outlining(stamped):
            start = time.perf_counter()
            self.steps(1)
            self.compile_s = time.perf_counter() - start
        self.taken: list[float] = []

    @torch.no_grad()
    def steps(self, count: int) -> float:
        """Run `count` steps; milliseconds of one."""
        decoder = self.decoder
        decoder.cache.reset()
        start = time.perf_counter()
        for _ in range(count):
            self.call(input_ids=decoder.token, logits_to_keep=1, **decoder.extra)
        return (time.perf_counter() - start) / count * 1e3


def measure(model: str = "smollm2", rounds: int = 9) -> dict[str, Any]:
    """Milliseconds of a decode step and seconds of its cold compile, by case."""
    with _fresh_caches():
        torch.compile(torch.sin)(torch.ones(8))  # the first compile of a process pays for imports
    weights = load(model, "bf16", False, None).model  # one copy: where weights lie in memory counts
    cases = {"once": Case(weights, True), "in full": Case(weights, False)}
    for case in cases.values():
        case.steps(STEPS)
    for number in range(rounds):
        for name in sorted(cases, reverse=bool(number % 2)):
            cases[name].taken.append(cases[name].steps(STEPS))
    ratios = [a / b for a, b in zip(cases["once"].taken, cases["in full"].taken, strict=True)]
    return {
        "step_ms": {name: statistics.median(case.taken) for name, case in cases.items()},
        "compile_s": {name: case.compile_s for name, case in cases.items()},
        "ratio": statistics.median(ratios),
    }


@contextmanager
def _outlining(stamped: bool) -> Iterator[None]:
    """Find no repeated layer where not `stamped`."""
    found = lower.outline if stamped else lambda gm: []
    with mock.patch.object(lower, "outline", found):
        yield


@contextmanager
def _fresh_caches() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, SITSOPT_CACHE=folder):
        from torch._inductor.utils import fresh_cache

        with fresh_cache(dir=folder):
            yield


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    result = measure(given.model, given.rounds)
    if given.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{given.model}: a decode step, its repeated layers compiled once and in full")
    for name, value in result["step_ms"].items():
        print(f"  {name:8} {value:7.2f} ms   cold compile {result['compile_s'][name]:6.1f} s")
    print(f"  ratio    {result['ratio']:7.3f}")


if __name__ == "__main__":
    main()
