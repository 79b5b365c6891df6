"""An order for work that needs other work, on several streams. Knows nothing of graphs, and imports no torch."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
