"""Timing on a GPU: CUDA graphs of many launches over rotating operands, contenders in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Call = Callable[[int], object]
ROTATE = 300e6  # bytes of distinct operands, so that no cache serves the next launch


def graph(call: Call, count: int) -> torch.cuda.CUDAGraph:
    """`count` calls, numbered, captured once; the call is warm afterwards."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(min(3, count)):
            call(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for i in range(count):
            call(i)
    return made


def once(made: torch.cuda.CUDAGraph, count: int) -> float:
    """Microseconds a call in one replay."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    made.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / count


def alternate(calls: dict[str, Call], count: int, rounds: int = 7) -> dict[str, float]:
    """Median microseconds a call of each contender, one after another in every round."""
    graphs = {name: graph(call, count) for name, call in calls.items()}
    for made in graphs.values():
        once(made, count)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, made in graphs.items():
            taken[name].append(once(made, count))
    return {name: statistics.median(times) for name, times in taken.items()}


def copies(bytes_each: float) -> int:
    """How many sets of operands make up what rotates; between 2 and 64."""
    return int(max(2, min(64, ROTATE // max(bytes_each, 1) + 1)))


def probes() -> dict[str, float]:
    """Bandwidth of a copy and of a read in GB/s; the gap between two tiny kernels of a graph in us."""
    size = 1 << 28
    a, b = (torch.empty(size, dtype=torch.float32, device="cuda").normal_() for _ in range(2))
    copy = alternate({"copy": lambda i: b.copy_(a)}, 4)["copy"]
    read = alternate({"read": lambda i: torch.sum(a)}, 4)["read"]
    tiny = torch.zeros(32, device="cuda")
    gap = alternate({"gap": lambda i: tiny.add_(1)}, 256)["gap"]
    return {
        "copy_gbs": round(8 * size / copy / 1e3, 1),
        "read_gbs": round(4 * size / read / 1e3, 1),
        "launch_gap_us": round(gap, 2),
    }


def spread(
    make: Callable[[], Sequence[torch.Tensor]], bytes_each: float
) -> list[Sequence[torch.Tensor]]:
    """Enough sets of operands to rotate through."""
    return [make() for _ in range(copies(bytes_each))]
