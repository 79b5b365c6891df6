"""Captures a function once it has been called a few times with inputs of one kind, and replays it from then on.

Whatever is in doubt runs plainly, and is noted: a capture that fails, an input that lies elsewhere too often, results
that are views of inputs, memory beyond the limit, another thread that is inside already.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...spec.region import RegionFile

Key = tuple[Any, ...]


class Device(Protocol):
    """What an executor asks of a GPU; `cuda.Cuda` is the real one."""

    def busy(self) -> bool:
        """Whether the current stream is being captured, by whomever."""

    def warm(self, call: Callable[[], Any]) -> Any:
        """Run a call on the stream that will be captured; its result, ready for the current stream."""

    def capture(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph with `replay()` and `reset()`, and the static results. Raises RuntimeError."""

    def reserved(self) -> int:
        """Bytes that the allocator holds."""


@dataclass(frozen=True)
class Limits:
    """held: which arguments stay where they lie; warmup, most, moves and buckets as in a region rule; limit_bytes:
    for all captures of one function; kept: results that are handed on as they are, the next replay's to overwrite."""

    held: frozenset[int]
    warmup: int = 3
    most: int = 8
    moves: int = 4
    buckets: tuple[int, ...] = ()
    limit_bytes: int | None = None
    kept: frozenset[int] = frozenset()

    @staticmethod
    def of(
        rule: RegionFile, held: frozenset[int], limit_bytes: int | None, kept: frozenset[int] = frozenset()
    ) -> Limits:  # fmt: skip
        """The limits that a rule gives."""
        one = rule.captures
        return Limits(held, one.warmup, one.most, one.moves, tuple(one.buckets), limit_bytes, kept)


class Doubt(RuntimeError):
    """Something that a replay might get wrong; the text says what."""


@dataclass
class _Capture:
    graph: Any
    buffers: list[tuple[int, torch.Tensor]]
    addresses: list[tuple[int, int]]
    several: bool
    results: list[Any]


class Captures:
    """A function with the captures of it. `notes` gets a line for everything that speaks against a replay."""

    def __init__(
        self, fn: Callable[..., Any], limits: Limits, device: Device, notes: list[str] | None = None
    ) -> None:
        self.fn, self.limits, self.device = fn, limits, device
        self.notes: list[str] = [] if notes is None else notes
        self.kept: OrderedDict[Key, _Capture] = OrderedDict()
        self.calls: Counter[Key] = Counter()
        self.moved = self.replays = self.bytes = 0
        self.refused = ""
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        if self.refused or self.device.busy() or not self.lock.acquire(blocking=False):
            return self.fn(*args)
        try:
            return self._run(args)
        finally:
            self.lock.release()

    def _run(self, args: Sequence[Any]) -> Any:
        key = self._key(args)
        if key is None:
            return self.fn(*args)
        found = self.kept.get(key)
        if found is not None and any(args[i].data_ptr() != p for i, p in found.addresses):
            self._drop(key)
            found = None
            self.moved += 1
            if self.moved > self.limits.moves:
                return self._refuse(f"a weight, cache or buffer lay elsewhere {self.moved} times", args)  # fmt: skip
        if found is None:
            self.calls[key] += 1
            if self.calls[key] < self.limits.warmup:
                return self.fn(*args)
            if self.calls[key] == self.limits.warmup:
                return self.device.warm(lambda: self.fn(*args))
            try:
                found = self._capture(key, args)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                return self._refuse(_first_line(error), args)
        self.kept.move_to_end(key)
        return self._replay(found, args)

    def _key(self, args: Sequence[Any]) -> Key | None:
        """What a capture is made for: sizes, strides and dtypes of what is copied, and numbers. None where nothing is
        captured for such arguments."""
        largest = max(self.limits.buckets, default=None)
        parts: list[Any] = []
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                if torch.is_grad_enabled() and arg.requires_grad:
                    return None
                if i not in self.limits.held:
                    parts.append((arg.shape, arg.stride(), arg.dtype, arg.device))
            elif isinstance(arg, int) and largest is not None and arg > largest:
                return None
            else:
                parts.append(arg)
        return tuple(parts)

    def _capture(self, key: Key, args: Sequence[Any]) -> _Capture:
        copied = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in self.limits.held]  # fmt: skip
        buffers = [(i, _like(args[i])) for i in copied]
        addresses = [(i, args[i].data_ptr()) for i in sorted(self.limits.held) if isinstance(args[i], torch.Tensor)]  # fmt: skip
        for i, buffer in buffers:
            buffer.copy_(args[i])
        given = list(args)
        for i, buffer in buffers:
            given[i] = buffer
        before = self.device.reserved()
        graph, made = self.device.capture(lambda: self.fn(*given))
        several = isinstance(made, tuple | list)
        results = list(made) if several else [made]
        found = _Capture(graph, buffers, addresses, several, results)
        try:
            _no_views(results, given)
            self._bound(self.device.reserved() - before)
        except Doubt:
            graph.reset()
            raise
        while len(self.kept) >= self.limits.most:
            self._drop(next(iter(self.kept)))
        self.kept[key] = found
        return found

    def _bound(self, grown: int) -> None:
        self.bytes += max(0, grown)
        limit = self.limits.limit_bytes
        if limit is not None and self.bytes > limit:
            raise Doubt(f"captures took {self.bytes / 2**20:.0f} MiB; {limit / 2**20:.0f} MiB are allowed")  # fmt: skip

    def _replay(self, found: _Capture, args: Sequence[Any]) -> Any:
        for i, buffer in found.buffers:
            buffer.copy_(args[i])
        found.graph.replay()
        self.replays += 1
        results = [
            r.clone() if isinstance(r, torch.Tensor) and i not in self.limits.kept else r
            for i, r in enumerate(found.results)
        ]  # the next replay writes to the results themselves
        return results if found.several else results[0]

    def _drop(self, key: Key) -> None:
        self.kept.pop(key).graph.reset()
        self.calls[key] = self.limits.warmup  # warm it is

    def _refuse(self, why: str, args: Sequence[Any]) -> Any:
        """From now on everything runs plainly."""
        self.refused = why
        self.notes.append(f"not captured: {why}")
        for key in list(self.kept):
            self._drop(key)
        return self.fn(*args)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A buffer for copies of a tensor. Raises Doubt where several of its places are one."""
    if any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        raise Doubt("an input is expanded: several of its places are one")
    if tensor.layout is not torch.strided:
        raise Doubt(f"an input has the layout {tensor.layout}")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)  # fmt: skip


def _no_views(results: Sequence[Any], given: Sequence[Any]) -> None:
    """Raises Doubt where a result lies in an input: a copy of it would be another tensor than the caller expects."""
    homes = {a.untyped_storage().data_ptr() for a in given if isinstance(a, torch.Tensor)} - {0}
    for result in results:
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() in homes:
            raise Doubt("a result is a view of an input")


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, Doubt) else f"the capture failed: {type(error).__name__}: {text}"  # fmt: skip
