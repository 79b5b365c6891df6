"""Who runs kernels: the one thing that differs between an interpreter, a GPU and a plan on paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from sitsopt.emit.triton.source import Source

from .interpreter import interpret

Run = Callable[[Source, tuple[int, ...], list[Any]], None]


class NoText(Exception):
    """There is no kernel text for this form of an op; the message says which form it is."""


@dataclass(frozen=True)
class Runner:
    """run: starts one kernel. tuned: its block sizes on the device. units: processors of the device."""

    run: Run
    tuned: Callable[[Source], Source] = lambda source: source
    units: int = 1

    def source(self, generate: Callable[[Any], Source], kernel: Any) -> Source:
        """The text of a kernel description at the block sizes of this device."""
        return self.tuned(_text(generate, kernel))


@lru_cache(maxsize=1024)
def _text(generate: Callable[[Any], Source], kernel: Any) -> Source:
    return generate(kernel)


INTERPRETER = Runner(interpret)


@dataclass(frozen=True)
class Launch:
    """One kernel start as it was asked for; the tensors among `args` may be fake."""

    source: Source
    grid: tuple[Any, ...]
    args: tuple[Any, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [arg for arg in self.args if isinstance(arg, torch.Tensor)]


@dataclass
class Recorder:
    """Keeps what would be launched and launches nothing."""

    launches: list[Launch] = field(default_factory=list)

    def __call__(self, source: Source, grid: tuple[int, ...], args: list[Any]) -> None:
        self.launches.append(Launch(source, tuple(grid), tuple(args)))
