"""A compiled graph with what surrounds it: which arguments it takes, folded values, writes behind it.

`call` has Dynamo's calling convention. `dump` and `load` carry it to another process.
"""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import vector_isa
from .capture.cuda import Cuda
from .capture.executor import Captures, Limits
from .kernels import load as kernels
from .region.compiled import Region
from .weights import Hoisted, Watch, revived, share, written
from .writes import Behind, Sharing

Compiled = Callable[..., Any]
LARGEST_CONSTANT = 1 << 20  # bytes of a graph's own constants that are written out with it


class CannotDump(RuntimeError):
    """The product lives in this process only; the text says why."""


class SharesStorage(RuntimeError):
    """Inputs share storage in another way than those the graph was compiled for, and the graph that would do is
    not at hand. Raised before anything was computed."""


@dataclass
class Product:
    """keep: which of Dynamo's `total` arguments the compiled graph takes, before the folded values; attached: values
    of Dynamo's own graph, which come first where sources are numbered; constants: tensors of the compiled graph, which
    what was loaded takes before everything else; otherwise: the graph as it came."""

    compiled: Compiled
    keep: list[int]
    total: int
    hoisted: list[Hoisted] = field(default_factory=list)
    attached: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    behind: Behind = field(default_factory=lambda: Behind([]))
    sharing: Sharing | None = None
    otherwise: Compiled | None = None
    watch: Watch = field(default_factory=Watch)
    limits: Limits | None = None  # where the whole graph is captured and replayed
    notes: list[str] = field(default_factory=list)  # what spoke against that
    shared: bool = True  # whether its folded values are those of other graphs too
    folded: Callable[[Sequence[Any]], None] | None = (
        None  # told the arguments, once values are folded
    )

    def call(self) -> Compiled:
        """The callable for Dynamo: all arguments in, all results out."""
        called = self._with_writes(self._selecting())
        if self.sharing is None:
            return called
        return self.sharing.guard(called, self.otherwise or _refuse)

    def fold(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The folded values for Dynamo's arguments as they are now."""
        if not self.shared:
            share(self.hoisted, (*self.attached, *args))
            self.shared = True
        values = fold(self.watch, self.hoisted, self.attached, args)
        if self.folded is not None:
            tell, self.folded = self.folded, None
            tell(args)
        return values

    def _with_writes(self, called: Compiled) -> Compiled:
        behind, attached, count = self.behind, self.attached, len(self.behind.places)
        if not count:
            return called

        def call(*args: Any) -> Any:
            results = called(*args)
            behind.write((*attached, *args), results[-count:])
            return results[:-count]

        return call

    def _selecting(self) -> Compiled:
        compiled, keep = self._capturing(), self.keep
        if self.hoisted:
            return lambda *args: compiled(*[args[i] for i in keep], *self.fold(args))
        if keep == list(range(self.total)):
            return compiled
        if len(keep) == 0:
            return lambda *args: compiled()
        if len(keep) == 1:
            only = keep[0]
            return lambda *args: compiled(args[only])
        pick = operator.itemgetter(*keep)
        return lambda *args: compiled(*pick(args))

    def _capturing(self) -> Compiled:
        if self.limits is None or not torch.cuda.is_available():
            return self.compiled
        return Captures(self.compiled, self.limits, Cuda(), self.notes)

    def dump(self) -> bytes:
        """Everything but `otherwise`, as bytes. Raises CannotDump."""
        write = getattr(self.compiled, "serialize", None)
        if write is None:
            raise CannotDump("the compiled graph cannot be written out")
        own = [*self.attached, *self.constants]
        if any(isinstance(a, torch.nn.Parameter) or not _small(a) for a in own):
            raise CannotDump("the graph carries large constants of its own")
        parts = {
            "keep": self.keep,
            "total": self.total,
            "hoisted": [written(h) for h in self.hoisted],
            "attached": self.attached,
            "constants": self.constants,
            "behind": self.behind.places,
            "sharing": self.sharing,
            "limits": self.limits,
            "kernels": kernels.loaded(),
            "isas": vector_isa.working(),
        }
        try:
            with torch._functorch.config.patch(bundled_autograd_cache=True):
                return pickle.dumps((parts, write()))
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
            raise CannotDump(f"{type(error).__name__}: {error}") from error

    @staticmethod
    def load(data: bytes) -> Product:
        """A product from the bytes of `dump`. Raises BuildError where its kernels cannot be had."""
        from torch._functorch._aot_autograd.aot_autograd_result import (
            deserialize_bundled_cache_entry,
        )

        parts, compiled = pickle.loads(data)
        kernels.restore(parts["kernels"])
        revived_call, constants = compiled, []  # a region revives itself, and brings its constants
        if not isinstance(compiled, Region):
            constants = parts["constants"]
            with vector_isa.taken_as_working(parts["isas"]):
                revived_call = deserialize_bundled_cache_entry(compiled)
        return Product(
            compiled=functools.partial(revived_call, *constants) if constants else revived_call,
            keep=parts["keep"],
            total=parts["total"],
            hoisted=[revived(*h) for h in parts["hoisted"]],
            attached=parts["attached"],
            behind=Behind(parts["behind"]),
            sharing=parts["sharing"],
            limits=parts["limits"],
            shared=False,
        )


def fold(
    watch: Watch, hoisted: list[Hoisted], attached: Sequence[Any], args: Sequence[Any]
) -> list[torch.Tensor]:
    """The folded values for arguments as they are now."""
    return watch.values(hoisted, (*attached, *args) if attached else args)


def _small(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.nbytes <= LARGEST_CONSTANT


def _refuse(*args: Any) -> Any:
    raise SharesStorage
