"""Stepping down when memory runs out, without losing the call: one step, the same call again, and so on."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from . import memory
from .memory import Reading, Thresholds, Trend
from .rollback import CannotUndo, snapshot

log = logging.getLogger("sitsopt")

ORDER = ("pools", "cache", "speculation", "graphs", "plain")
ROWS = "rows"  # no step of a recipe: the caller runs the same rows in smaller calls, as often as that helps
_DIVISIBLE: ContextVar[bool] = ContextVar("divisible", default=False)
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


class SmallerCalls(MemoryError):
    """A call ran out of memory, its cache is as before, and whoever made it said that it can be made in parts."""


@contextmanager
def divisible() -> Iterator[None]:
    """Calls in here are parts of something that their caller can do in smaller ones: SmallerCalls asks for them."""
    token = _DIVISIBLE.set(True)
    try:
        yield
    finally:
        _DIVISIBLE.reset(token)


@dataclass(frozen=True)
class Call:
    """The arguments of the call that is in trouble. most: how many parts (layers) of it a step may treat, where a step
    is taken again as it was taken before."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    most: int | None = None


@dataclass(frozen=True)
class Done:
    """What a step did, and to how many parts where it treats these one by one."""

    text: str
    parts: int | None = None


@dataclass
class Step:
    """A way to need less memory. `take` does it and says what it did; `missing` says why there is nothing to do
    (now), or is empty; `gives` is a callable for the calls from here on, or None for no change."""

    name: str
    take: Callable[[Call], str | Done]
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
    parts: int | None = None

    @property
    def forced(self) -> str:
        """The step as `Guarded.forced` names it: `cache:3` for three layers of a cache."""
        return self.step if self.parts is None else f"{self.step}:{self.parts}"


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

    `forced` maps the number of a call (from 0) to the steps to take before it, as `taken()` names them: what a run did
    can be done again without the lack of memory. Raises what the call raises when no step is left, and for a cache that cannot
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
        self._left = False  # whether the graphs were: then other sizes of a call cost nothing
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
                if not is_allocation_failure(error) or not self._undone(undo):
                    raise
                cause = _cause(error)
                if not self._step(number, call, cause) and not _DIVISIBLE.get():
                    raise
            # Outside the handler: its traceback keeps the failed call's tensors alive until here.
            if _DIVISIBLE.get() and (self._left or self._next >= len(self.steps)):
                self._smaller(number, cause)
            undo = snapshot(args, kwargs)  # a step may have put other layers into a cache

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
                if not is_allocation_failure(error) or not self._undone(undo):
                    raise
                if not self._step(self.calls, call, _cause(error)):
                    raise
            # From the beginning all steps so far are in force, but calls are as large as before.
            kept = [e for e in self.events if e.call < start or e.step != ROWS]
            self.events = [replace(e, call=min(e.call, start)) for e in kept]
            self.calls = start
            undo = snapshot(args, kwargs)
            torch.set_rng_state(random)

    def _before(self, number: int, call: Call) -> None:
        forced = self.forced.get(number, ())
        for name in forced:
            if name != ROWS:
                of, _, parts = name.partition(":")
                step = next(step for step in self.steps if step.name == of)
                most = int(parts) if parts else None
                self._take(step, number, replace(call, most=most), "forced")
        if ROWS in forced:
            self._smaller(number, "forced")
        if (
            not self.forced
            and self._next < len(self.steps)
            and (sign := self.trend.sign(self.reading()))
        ):
            self._step(number, call, sign)

    def _smaller(self, number: int, cause: str) -> NoReturn:
        self.events.append(Event(number, ROWS, cause, "made again in smaller calls"))
        raise SmallerCalls(cause)

    def _undone(self, undo: Callable[[], None]) -> bool:
        """After a failure: whether the caches are as before the call."""
        self.reserve = None
        self.trend.failed(time.monotonic())
        try:
            undo()
        except CannotUndo as error:
            log.error("%s", error)
            return False
        return True

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
        came = f"nothing: {why}" if why else step.take(call)
        done = came if isinstance(came, Done) else Done(came)
        nothing = done.text.startswith("nothing:")
        if step.gives is not None and not nothing:
            self.call, self._left = step.gives, True
        self.events.append(Event(number, step.name, cause, done.text, done.parts))
        log.warning("memory, call %d: %s (%s): %s", number, step.name, cause, done.text)
        self.trend.forget()
        return not nothing

    def taken(self) -> dict[int, list[str]]:
        """Steps that were taken, by call: as `forced` of another run takes them."""
        found: dict[int, list[str]] = {}
        for event in self.events:
            if not event.done.startswith("nothing:"):
                found.setdefault(event.call, []).append(event.forced)
        return found

    def json(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in self.events]
