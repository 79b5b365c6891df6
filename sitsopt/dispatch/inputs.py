"""The inputs of a compiled graph, remembered from call to call.

Most of a graph's inputs are the model's own tensors and those of a cache that is passed again and again. While the
model is still, and such an argument is the same object with the same contents, they are the same tensors; only the
tensors that are arguments themselves are new.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .describe import PLAIN, TORCH, Describer, Opaque
from .trace import Locals
from .versions import Versions

MOST_MISSES = 8  # in a row, of an argument that is never twice the same

Place = tuple[str, Any]  # a local, and a key within it where it holds further arguments


@dataclass(frozen=True)
class Known:
    """The inputs of one call. `objects` are the arguments that hold tensors, `given` the inputs that are arguments."""

    turn: int
    inputs: list[Any]
    given: list[tuple[int, Place]]
    objects: list[tuple[Place, weakref.ref[Any]]]
    versions: Versions

    def now(self, turn: int, found: Locals) -> list[Any] | None:
        """The inputs of a call whose guards hold; None where they must be gathered."""
        if turn != self.turn or self.versions.changed():
            return None
        try:
            if any(at(found, place) is not ref() for place, ref in self.objects):
                return None
            inputs = self.inputs.copy()
            for index, place in self.given:
                inputs[index] = at(found, place)
        except (KeyError, IndexError):
            return None
        return inputs


class Inputs:
    """The inputs of one graph. `graph` stands in its place in the byte code: called without arguments it runs the
    graph with the inputs that `use` was given in this thread."""

    def __init__(self, compiled: Callable[..., Any], containers: Sequence[str]) -> None:
        self.compiled, self.containers = compiled, containers
        self.known: Known | None = None
        self.misses = 0
        self._local = _Local()

    def graph(self, *args: Any) -> Any:
        """The compiled graph."""
        local = self._local
        if not args and local.inputs is not None:
            args, local.inputs = local.inputs, None
        elif local.learning:
            local.seen = args
        return self.compiled(*args)

    def use(self, turn: int, found: Locals) -> bool:
        """Whether the inputs are known; if so, the next call of `graph` in this thread takes them."""
        if self.known is None:
            return False
        self._local.inputs = self.known.now(turn, found)
        if self._local.inputs is None:
            return False
        self.misses = 0
        return True

    def learning(self, run: Callable[[], Any], watched: Any, found: Locals) -> Any:
        """`run`, which gathers the inputs; they are remembered. Give it the model's watch."""
        if self.misses >= MOST_MISSES:
            return run()
        local = self._local
        local.learning, turn = True, watched.turn
        try:
            result = run()
        finally:
            local.learning, seen, local.seen = False, local.seen, None
        self.misses += 1
        if seen is not None:
            self.known = self._learn(seen, turn, watched.tensors, found)
            if self.known is None:
                self.misses = MOST_MISSES
        return result

    def _learn(
        self, seen: Sequence[Any], turn: int, tensors: Sequence[Any], found: Locals
    ) -> Known | None:
        describer, places, objects = Describer(), {}, []
        try:
            for place, value in _arguments(found, self.containers):
                if isinstance(value, torch.Tensor):
                    places[id(value)] = place
                elif not isinstance(value, (*PLAIN, *TORCH, torch.nn.Module)):
                    describer.digest(value)
                    objects.append((place, weakref.ref(value, self._forget)))
        except (Opaque, TypeError):  # it cannot be looked into, or not be referred to weakly
            return None
        if describer.slotted:
            return None
        held = {id(t) for t in (*tensors, *describer.tensors)}
        if not all(id(t) in places or id(t) in held for t in seen):
            return None
        given = [(i, places[id(t)]) for i, t in enumerate(seen) if id(t) in places]
        versions = Versions(describer.dicts, describer.types, describer.lists, describer.sets)
        kept = [None if id(t) in places else t for t in seen]
        return Known(turn, kept, given, objects, versions)

    def _forget(self, _: Any) -> None:
        """An argument has died: its tensors are not kept alive."""
        self.known = None


class _Local(threading.local):
    inputs: Any = None
    seen: Any = None
    learning: bool = False


def at(found: Locals, place: Place) -> Any:
    """The argument at a place."""
    name, key = place
    value = found[name]
    return value if key is None else value[key]


def _arguments(found: Locals, containers: Sequence[str]) -> Iterator[tuple[Place, Any]]:
    """All arguments of a call, with those that `*args` and `**kwargs` hold."""
    for name, value in found.items():
        if name not in containers:
            yield (name, None), value
        else:
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in inner:
                yield (name, key), item
