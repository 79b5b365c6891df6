"""Stepping down when memory runs out, without losing the call: one step, the same call again, and so on."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from . import memory
from .memory import Reading, Thresholds, Trend
from .rollback import CannotUndo, snapshot

log = logging.getLogger("sitsopt")

ORDER = ("pools", "cache", "speculation", "graphs", "plain")
RESERVE = 4 << 20  # bytes held back, let go first: stepping down needs a little memory itself
# As torch, its C++ and (wrapping what it compiles) Dynamo say it.
TEXTS = (
    "memoryerror",
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "bad_alloc",
    "not enough memory",
)


@dataclass(frozen=True)
class Call:
    """The arguments of the call that is in trouble."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Step:
    """A way to need less memory. `take` does it and says what it did; `missing` says why there is nothing to do
    (now), or is empty; `gives` is a callable for the calls from here on, or None for no change."""

    name: str
    take: Callable[[Call], str]
    missing: Callable[[Call], str] = lambda call: ""
    gives: Callable[..., Any] | None = None


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


@dataclass(frozen=True)
class Event:
    """A step that was taken (or had nothing to give): at which call, and what for."""

    call: int
    step: str
    cause: str
    done: str


def absent(name: str, why: str) -> Step:
    """A step that cannot be taken here."""
    return Step(name, lambda call: why, lambda call: why)


def release_pools(call: Call) -> str:
    """Garbage, the allocator's free blocks, the device's."""
    import torch

    found = gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    gave = memory.trim()
    return f"{found} objects collected, " + (
        "the heap gave memory back" if gave else "the heap had none to give"
    )


def is_allocation_failure(error: BaseException) -> bool:
    """Whether an error means that memory could not be had."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == 12
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in TEXTS)


class Guarded:
    """Calls `call`; when memory runs out, or is about to, takes the next step and goes on.

    `forced` maps the number of a call (from 0) to the names of steps to take before it: what a run did can be done
    again without the lack of memory. Raises what the call raises when no step is left, and for a cache that cannot
    be set back to before the call.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        steps: Sequence[Step],
        thresholds: Thresholds,
        reading: Callable[[], Reading] = memory.read,
        forced: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.call, self.steps = call, list(steps)
        self.trend, self.reading, self.forced = Trend(thresholds), reading, dict(forced or {})
        self.calls = 0
        self.events: list[Event] = []
        self.reserve: bytearray | None = bytearray(RESERVE)
        self._next = 0
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        call = Call(args, kwargs)
        self._before(number, call)
        undo = snapshot(args, kwargs)
        while True:
            try:
                return self.call(*args, **kwargs)
            except Exception as error:
                if not is_allocation_failure(error):
                    raise
                if not self._after_failure(number, call, _cause(error), undo):
                    raise
            # Outside the handler: its traceback keeps the failed call's tensors alive until here. A step may have
            # put other layers into a cache.
            undo = snapshot(args, kwargs)

    def request(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A whole request, such as `generate`, whose calls of the model are guarded. What fails between them, or in a
        call that cannot be made again, begins anew from the same random numbers after a step. A request with a
        `streamer` is run once: what was shown cannot be taken back."""
        import torch

        if kwargs.get("streamer") is not None:
            return function(*args, **kwargs)
        start, call, random = self.calls, Call(args, kwargs), torch.get_rng_state()
        undo = snapshot(args, kwargs)
        while True:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not is_allocation_failure(error):
                    raise
                if not self._after_failure(self.calls, call, _cause(error), undo):
                    raise
            # From the beginning all steps so far are in force.
            self.events = [replace(e, call=start) if e.call > start else e for e in self.events]
            self.calls = start
            undo = snapshot(args, kwargs)
            torch.set_rng_state(random)

    def _before(self, number: int, call: Call) -> None:
        for name in self.forced.get(number, ()):
            self._take(
                next(step for step in self.steps if step.name == name), number, call, "forced"
            )
        if (
            not self.forced
            and self._next < len(self.steps)
            and (sign := self.trend.sign(self.reading()))
        ):
            self._step(number, call, sign)

    def _after_failure(self, number: int, call: Call, cause: str, undo: Callable[[], None]) -> bool:
        self.reserve = None
        self.trend.failed(time.monotonic())
        try:
            undo()
        except CannotUndo as error:
            log.error("%s", error)
            return False
        return self._step(number, call, cause)

    def _step(self, number: int, call: Call, cause: str) -> bool:
        """Take the next step that gives anything; whether there was one."""
        with self._lock:
            while self._next < len(self.steps):
                step = self.steps[self._next]
                self._next += 1
                if self._take(step, number, call, cause):
                    return True
            return False

    def _take(self, step: Step, number: int, call: Call, cause: str) -> bool:
        why = step.missing(call)
        if not why:
            self.reserve = None
        done = f"nothing: {why}" if why else step.take(call)
        nothing = done.startswith("nothing:")
        if step.gives is not None and not nothing:
            self.call = step.gives
        self.events.append(Event(number, step.name, cause, done))
        log.warning("memory, call %d: %s (%s): %s", number, step.name, cause, done)
        self.trend.forget()
        return not nothing

    def taken(self) -> dict[int, list[str]]:
        """Steps that were taken, by call: as `forced` of another run takes them."""
        found: dict[int, list[str]] = {}
        for event in self.events:
            if not event.done.startswith("nothing:"):
                found.setdefault(event.call, []).append(event.step)
        return found

    def json(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in self.events]
