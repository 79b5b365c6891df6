"""The hook `streams`: when a CUDA graph may be captured, which streams there are, and in what order kernels that do
not need each other are started."""

from __future__ import annotations

import gc
import graphlib
import heapq
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .facts import Facts
from .plan import Plan, Settings, Wanted


class NotReady(RuntimeError):
    """A capture must not begin; the text says what is still pending."""


@dataclass(frozen=True)
class Work:
    """A kernel or a chain of them: what it needs first, and its microseconds."""

    name: str
    needs: tuple[str, ...] = ()
    us: float = 1.0


@dataclass(frozen=True)
class Launch:
    """A piece of work on a stream, after the events of `waits`; start in microseconds, as planned."""

    name: str
    stream: int
    waits: tuple[str, ...]
    start: float


class Streams(Settings):
    """Plans stream priorities and the capture window. It sets nothing: a window is opened by who captures."""

    name = "streams"
    after = ("hbm",)

    def plan(self, facts: Facts, wanted: Wanted) -> Plan:
        plan = Plan(self.name)
        if not facts["gpu.count"]:
            why = facts.all["nvml"].problem or "there is no GPU"
            return plan.refuse("stream priorities and the capture window", why)
        cuda = _cuda()
        if cuda is None:
            return plan.refuse(
                "stream priorities and the capture window", "this torch has no CUDA device"
            )
        least, most = cuda.Stream.priority_range()
        plan.data["priorities"] = {"main": most, "side": least}
        plan.data["window"] = pending(cuda) or "may open now"
        return plan


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def pending(cuda: Any, streams: Sequence[Any] = ()) -> str:
    """Why a capture must not begin now, or nothing."""
    if not cuda.is_initialized():
        return "CUDA is not initialised: the first kernel would allocate inside the capture"
    if cuda.is_current_stream_capturing():
        return "a capture is going on already"
    busy = [
        place
        for place, stream in enumerate((cuda.current_stream(), *streams))
        if not stream.query()
    ]
    return f"work is pending on {len(busy)} of {1 + len(streams)} streams" if busy else ""


@contextmanager
def capture_window(cuda: Any, streams: Sequence[Any] = (), settle: bool = True) -> Iterator[None]:
    """Open while nothing can disturb a capture: garbage is collected (a tensor freed inside would be an error),
    streams are empty, and the collector stays off until the end. With `settle` pending work is waited for.

    Raises NotReady, also when the block itself left the stream capturing.
    """
    enabled = gc.isenabled()
    gc.collect()
    if settle and cuda.is_initialized() and not cuda.is_current_stream_capturing():
        cuda.synchronize()
    if why := pending(cuda, streams):
        raise NotReady(why)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
    if cuda.is_current_stream_capturing():
        raise NotReady("the capture was not ended")


def schedule(work: Sequence[Work], streams: int = 2) -> list[Launch]:
    """An order that respects `needs` and starts what has the longest chain behind it first, each piece on the
    stream where it can begin soonest. The same input gives the same order.

    Raises ValueError for a need that does not exist, and for a circle.
    """
    tails, users = _tails(work), _users(work)
    place = {one.name: i for i, one in enumerate(work)}
    missing = {one.name: len(set(one.needs)) for one in work}
    ready = [(-tails[o.name], place[o.name]) for o in work if not o.needs]
    heapq.heapify(ready)
    free, done, home = [0.0] * streams, dict[str, float](), dict[str, int]()
    launches: list[Launch] = []
    while ready:
        best = work[heapq.heappop(ready)[1]]
        after = max((done[n] for n in best.needs), default=0.0)
        stream = min(range(streams), key=lambda s: (max(free[s], after), _away(best, s, home), s))
        start = max(free[stream], after)
        waits = tuple(n for n in best.needs if home[n] != stream)
        launches.append(Launch(best.name, stream, waits, start))
        free[stream] = done[best.name] = start + best.us
        home[best.name] = stream
        for name in users[best.name]:
            missing[name] -= 1
            if not missing[name]:
                heapq.heappush(ready, (-tails[name], place[name]))
    return launches


def _away(one: Work, stream: int, home: Mapping[str, int]) -> int:
    """Needs that lie on another stream: each costs an event."""
    return sum(home[need] != stream for need in one.needs)


def _users(work: Sequence[Work]) -> dict[str, list[str]]:
    """What reads each piece's result. Raises ValueError for a need that does not exist."""
    users: dict[str, list[str]] = {one.name: [] for one in work}
    for one in work:
        for need in dict.fromkeys(one.needs):
            if need not in users:
                raise ValueError(f"{one.name} needs {need}, which is not there")
            users[need].append(one.name)
    return users


def _tails(work: Sequence[Work]) -> dict[str, float]:
    """Microseconds of the longest chain that starts with each piece. Raises ValueError for a circle."""
    cost, users = {one.name: one.us for one in work}, _users(work)
    tails: dict[str, float] = {}
    try:  # whoever reads a result comes before it
        for name in graphlib.TopologicalSorter(users).static_order():
            tails[name] = cost[name] + max((tails[user] for user in users[name]), default=0.0)
    except graphlib.CycleError as error:
        raise ValueError("these need each other: " + ", ".join(error.args[1])) from error
    return tails
