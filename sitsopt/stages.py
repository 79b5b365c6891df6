"""What a compile is doing: each stage of each graph, told to the log `sitsopt` and to whoever listens.

with on_stage(print):
    model(x)    # graph0: capture / graph0: rewrite, 2016 ops / graph0: compile, 488 rewrites, 30 layers as one
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LOG = logging.getLogger("sitsopt")


@dataclass(frozen=True)
class Stage:
    """A stage that begins. name: capture, rewrite, compile, ready or fallback; detail: how much there is to do, or
    why; cached: what it would make was found on disk."""

    graph: str
    name: str
    detail: str = ""
    cached: bool = False

    def __str__(self) -> str:
        parts = [self.name, self.detail, "from the cache" if self.cached else ""]
        return f"{self.graph}: {', '.join(part for part in parts if part)}"


Listener = Callable[[Stage], object]
_listeners: list[Listener] = []


@contextmanager
def on_stage(listener: Listener) -> Iterator[None]:
    """Call `listener` with each Stage, in the thread that compiles, until the block ends."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(graph: str, name: str, detail: str = "", cached: bool = False) -> None:
    """Announce a stage. What a listener raises reaches the caller of the compiled model."""
    stage = Stage(graph, name, detail, cached)
    LOG.info("%s", stage)
    for listener in list(_listeners):
        listener(stage)


def counted(number: int, what: str) -> str:
    """`1 op`, `2 ops`."""
    return f"{number} {what}{'s' * (number != 1)}"
