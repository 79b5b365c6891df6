"""How long two ways of doing the same take, in turns, so that what else the machine does strikes both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
BUDGET_S = 0.003  # of each contender on a CPU, rounds permitting
LEAST, MOST = 5, 40  # rounds
LONG_S = 0.5  # from here on the first call of each says enough: a prefill of thousands of tokens takes seconds
STEADY = 1.5  # the median over the shortest, at most, for a result worth keeping


@dataclass(frozen=True)
class Lap:
    """The shortest call in microseconds, and whether the usual one came near it: else the machine was busy."""

    us: float
    steady: bool


def race(contenders: Sequence[Sequence[Call]], device: str) -> list[Lap]:
    """A lap of each contender. A contender is a call a set of operands; the sets take turns, so that large ones do
    not stay in a cache."""
    times = (_on_gpu if device == "cuda" else _on_cpu)(contenders)
    return [Lap(min(t), statistics.median(t) <= STEADY * min(t)) for t in times]


def _on_cpu(contenders: Sequence[Sequence[Call]]) -> list[list[float]]:
    first = [[_us(calls[0])] for calls in contenders]
    if sum(t[0] for t in first) > LONG_S * 1e6:
        return first
    times: list[list[float]] = [[] for _ in contenders]
    start = time.perf_counter()
    for turn in range(MOST):
        for taken, calls in zip(times, contenders, strict=True):
            taken.append(_us(calls[turn % len(calls)]))
        if turn + 1 >= LEAST and time.perf_counter() - start > BUDGET_S * len(contenders):
            break
    return times


def _us(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begin)


def _on_gpu(contenders: Sequence[Sequence[Call]]) -> list[list[float]]:
    """As CUDA graphs of several calls: what the host needs to launch does not count."""
    graphs = [_captured(calls) for calls in contenders]
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(LEAST + 2):
        for taken, (graph, count) in zip(times, graphs, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(1e3 * begin.elapsed_time(end) / count)
    return times


def _captured(calls: Sequence[Call], least: int = 8) -> tuple[torch.cuda.CUDAGraph, int]:
    order = [calls[i % len(calls)] for i in range(max(least, len(calls)))]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in order:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in order:
            call()
    return graph, len(order)
