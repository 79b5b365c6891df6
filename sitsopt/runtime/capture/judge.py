"""Looks at a step as it really runs, and knows no plan: would a replay of what ran do the same?

    verdict = judge(lambda: model(**inputs))
    verdict.hazards            # what waits for the host, copies to it, or differs from call to call, with file and line

The step runs twice, every op of both runs is written down with the memory it reads, writes and allocates, and the two
are compared. `span(name)` around a part of the step judges the parts that have a name, each alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SYNC = "host sync"
COPY = "host copy"
SHAPE = "data-dependent shape"
WAIT = "synchronise"
ORDER = "order"
ADDRESS = "address"
ALLOCATION = "allocation"

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__))
_SPAN: ContextVar[str] = ContextVar("span", default="")
_PLACE: ContextVar[str] = ContextVar("place", default="")
# Waits of the host that are no op.
WAITS = (
    "torch.cuda.synchronize", "torch.cpu.synchronize", "torch.accelerator.synchronize",
    "torch.cuda.Stream.synchronize", "torch.cuda.Event.synchronize"
)  # fmt: skip
HOST = {"cpu", "numpy", "tolist", "__array__"}
MASKED = {"aten::index", "aten::index_put", "aten::index_put_"}  # wait only for a mask


@dataclass(frozen=True)
class Hazard:
    """One reason not to replay a span: its kind, what was called, and `file:line` of the innermost frame outside
    torch (or of the node that ran)."""

    kind: str
    what: str
    source: str
    span: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} ({self.source})" + (f" in {self.span}" if self.span else "")  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """One op of a run: whose memory it reads and writes (an address of before, or the number of an allocation of this
    run), and the bytes of what it allocates."""

    op: str
    span: str
    source: str
    memory: tuple[tuple[str, int], ...]
    allocated: tuple[int, ...]


@dataclass
class Verdict:
    """What two runs of a step showed. spans: ops seen by span (`""` where there was none)."""

    hazards: list[Hazard]
    spans: dict[str, int] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not self.hazards


@contextmanager
def span(name: str) -> Iterator[None]:
    """What runs inside is judged under this name; with a span anywhere, what runs outside of all is not judged."""
    token = _SPAN.set(name)
    try:
        yield
    finally:
        _SPAN.reset(token)


@contextmanager
def place(source: str) -> Iterator[None]:
    """What runs inside comes from this `file:line`, whatever Python code runs it."""
    token = _PLACE.set(source)
    try:
        yield
    finally:
        _PLACE.reset(token)


def judge(step: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> Verdict:
    """Run a step twice and compare; `prepare` runs before each, unwatched, to put back what the step changes."""
    runs = []
    for _ in range(2):
        watch = _Watch()
        prepare()
        with torch.no_grad(), watch:
            step()
        runs.append(watch)
    first, second = runs
    named = any(one.span for run in runs for one in run.seen)
    hazards = [h for h in dict.fromkeys(first.hazards + second.hazards) if h.span or not named]
    spans: dict[str, int] = {}
    for one in first.seen:
        if one.span or not named:
            spans[one.span] = spans.get(one.span, 0) + 1
    for name in dict.fromkeys([*spans, *(s.span for s in second.seen if s.span)]):
        mine = [[s for s in run.seen if s.span == name] for run in runs]
        hazards += _differences(name, *mine)
    return Verdict(hazards, spans)


def _differences(name: str, first: Sequence[Seen], second: Sequence[Seen]) -> Iterator[Hazard]:
    """The first way in which two runs of a span differ; what follows would only be its echo."""
    for one, other in zip(first, second, strict=False):
        if one.op != other.op:
            told = f"{other.op} ran at the second call where {one.op} ran at the first"
            yield Hazard(ORDER, told, other.source, name)
        elif one.memory != other.memory:
            told = f"{one.op} reads or writes other memory at the second call"
            yield Hazard(ADDRESS, told, one.source, name)
        elif one.allocated != other.allocated:
            told = f"{one.op} allocates {sum(other.allocated)} bytes at the second call, {sum(one.allocated)} at the first"  # fmt: skip
            yield Hazard(ALLOCATION, told, one.source, name)
        else:
            continue
        return
    if len(first) != len(second):
        longer = first if len(first) > len(second) else second
        left = longer[min(len(first), len(second))]
        yield Hazard(ORDER, f"{left.op} ran at one of two calls only", left.source, name)


class _Watch(TorchDispatchMode):
    """Writes down what runs. Everything it sees is kept alive, so that an address means one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self.hazards: list[Hazard] = []
        self.alive: list[torch.Tensor] = []
        self.made: dict[int, int] = {}  # address of a storage made in this run, to its number
        self.stack = ExitStack()

    def __enter__(self) -> Any:
        self.stack.enter_context(_Functions(self))
        for name in WAITS:
            self.stack.enter_context(_patched(name, self))
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self.stack.close()

    def note(self, kind: str, what: str) -> None:
        self.hazards.append(Hazard(kind, what, caller(), _SPAN.get()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if name == "aten::lift_fresh":
            self.note(COPY, "a tensor made of numbers of the host")
            return self._lifted(func(*args, **kwargs))
        before = [self._memory(t) for t in given]
        if torch.Tag.data_dependent_output in func.tags:
            self.note(SYNC, name)
        elif torch.Tag.dynamic_output_shape in func.tags or name in MASKED:
            masks = any(t.dtype in (torch.bool, torch.uint8) for t in _indices(args))
            if name not in MASKED or masks:
                self.note(SHAPE, name)
        result = func(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        devices = {t.device.type for t in given}
        if any(t.device.type == "cpu" for t in made) and devices - {"cpu"}:
            self.note(COPY, name)
        self._write(name, given, before, made)
        return result

    def _lifted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.alive.append(tensor)
        self.made.setdefault(tensor.untyped_storage()._cdata, len(self.made))
        return tensor

    def _write(
        self, name: str, given: list[torch.Tensor], before: list[tuple[str, int]], made: list[torch.Tensor]
    ) -> None:  # fmt: skip
        known = {t.untyped_storage()._cdata for t in given}
        fresh = [t for t in made if t.untyped_storage()._cdata not in known]
        for tensor in fresh:
            self.made.setdefault(tensor.untyped_storage()._cdata, len(self.made))
        self.alive += made
        sizes = tuple(t.untyped_storage().nbytes() for t in fresh)
        memory = (*before, *map(self._memory, made))
        self.seen.append(Seen(name, _SPAN.get(), caller(), memory, sizes))

    def _memory(self, tensor: torch.Tensor) -> tuple[str, int]:
        storage = tensor.untyped_storage()
        if storage._cdata in self.made:
            return "made", self.made[storage._cdata]
        return "address", tensor.data_ptr()


class _Functions(TorchFunctionMode):
    """Sees what asks for values on the host, also where a tensor lies there already and nothing is copied."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in HOST and func is getattr(torch.Tensor, name, None):
            self.watch.note(COPY, f"Tensor.{name}")
        elif name == "to" and "cpu" in (*args[1:], *kwargs.values()):
            self.watch.note(COPY, "Tensor.to('cpu')")
        return func(*args, **kwargs)


def _indices(args: Sequence[Any]) -> list[torch.Tensor]:
    return [t for t in tree_leaves(args[1:2]) if isinstance(t, torch.Tensor)]


@contextmanager
def _patched(name: str, watch: _Watch) -> Iterator[None]:
    """A function that waits, made to say so. Without a GPU there is nothing to wait for."""
    owner: Any = sys.modules["torch"]
    *parts, last = name.split(".")[1:]
    for part in parts:
        owner = getattr(owner, part)
    real = getattr(owner, last)

    def waits(*args: Any, **kwargs: Any) -> Any:
        watch.note(WAIT, name)
        return real(*args, **kwargs) if torch.cuda.is_available() or "cuda" not in name else None

    with patch.object(owner, last, waits):
        yield


def caller() -> str:
    """`file:line` of the node that runs, else of the innermost frame outside torch and this file."""
    if told := _PLACE.get():
        return told
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        outside = not file.startswith((_TORCH, _HERE, "<")) and "unittest/mock" not in file
        if outside and not file.endswith("contextlib.py"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
