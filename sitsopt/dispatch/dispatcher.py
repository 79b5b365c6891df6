"""The compiled calls of one model, and what happens when none fits.

A call that no entry fits is looked for on disk, else captured and compiled. Where a model cannot be captured whole,
or changes at every call, Dynamo's ordinary dispatch takes over, and the report says so.
"""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from ..backend import compile_one
from ..graph.released import as_parameters, cooling
from ..planning import check_once
from ..rewrite.record import Effective
from ..runtime.kernels import load as kernels
from ..runtime.product import CannotDump, Product, SharesStorage
from ..runtime.release import release_packed
from ..session import Session
from ..stages import counted, tell
from . import disk, versions
from .describe import Describer, Opaque
from .entry import Entry, Stale, load, made
from .settings import settings_digest
from .trace import Binder, Locals, NotWhole, trace
from .watch import Watch

log = logging.getLogger("sitsopt")
MOST = 16  # entries of one model; Dynamo's own limit is 8 for a function


class Dispatcher:
    """Calls `model` compiled. `ordinary` is the same through Dynamo's dispatch.

    Raises what the model raises; SpecError, ExpectationError and (under `strict`) LoweringError at a call that
    compiles. Safe from several threads.
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        ordinary: Callable[..., Any],
        dynamic: bool | None = None,
    ) -> None:
        self.model, self.session, self.ordinary, self.dynamic = model, session, ordinary, dynamic
        self.entries: list[Entry] = []
        self.lock = threading.RLock()
        self.method: Any = None
        self.from_disk = 0
        self.read: set[int] = set()  # ids of parameters that must not be released
        self.given_up = ""  # why Dynamo dispatches after all
        if why := versions.available():
            self._give_up(why)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.given_up or _elsewhere():
            return self.ordinary(*args, **kwargs)
        try:
            entry, found = self._find(args, kwargs) or self._make(args, kwargs)
        except (NotWhole, Opaque) as error:
            result = self.ordinary(*args, **kwargs)  # which may raise: then the call was at fault
            self._give_up(str(error))
            return result
        if entry is None:
            return self.ordinary(*args, **kwargs)
        try:
            return entry(self.watch, found, self.model, *args, **kwargs)
        except SharesStorage:
            return self.ordinary(*args, **kwargs)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, Locals] | None:
        """The entry for this call, and the call's locals."""
        if not self.entries:
            return None
        watch = self.watch
        if not watch.still() and watch.restless:
            raise NotWhole("the model changes its own attributes at every call")
        found = self.bind((self.model, *args), kwargs)
        if found is None:
            return None
        for entry in self.entries:
            if entry.usable(watch, found):
                return entry, found
        return None

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry | None, Locals]:
        with self.lock:
            self._prepare()
            known = self._find(args, kwargs)  # another thread was faster
            if known is not None:
                return known
            found = self.bind((self.model, *args), kwargs)
            if found is None:
                return None, {}
            if len(self.entries) >= MOST:
                raise NotWhole(f"{MOST} different calls were compiled")
            with as_parameters(self.model), cooling(self._releases()):
                entry = self._load(args, kwargs, found) or self._compile(args, kwargs, found)
            self._release_after(entry.product)
            self.entries = [entry, *self.entries]  # readers take no lock
            return entry, found

    def _prepare(self) -> None:
        """What the first call needs; again if `forward` was replaced."""
        method = self.model.forward
        if not isinstance(method, types.MethodType) or _hooked(self.model):
            raise NotWhole("the model's forward is not a plain method, or has hooks")
        if self.method is None or method.__func__ is not self.method.__func__:
            self.method, self.entries = method, []
            self.bind = Binder(cast(types.FunctionType, method.__func__))
            self.watch = Watch(self.model)
        self.watch.still()

    def _folder(self) -> Any:
        settings = settings_digest(self.session, self.dynamic)
        return disk.folder_of(Describer().digest([self.watch.digest, settings]))

    def _load(self, args: Any, kwargs: Any, found: Locals) -> Entry | None:
        for path in disk.names(self._folder(), Describer().digest([args, kwargs])):
            data = disk.read(path)
            if data is None:
                continue
            try:
                entry = load(data, self.method.__func__, found)
                if entry.digest != self.watch.digest:
                    raise Stale("it is of another model")
            except Exception as error:  # whatever is wrong with an entry, it is a miss
                level = logging.INFO if isinstance(error, Stale) else logging.WARNING
                log.log(level, "a compiled graph on disk is not used: %s", error)
                continue
            entry.settle(self.watch, found)
            self.from_disk += 1
            self._report(entry)
            return entry
        return None

    def _compile(self, args: Any, kwargs: Any, found: Locals) -> Entry:
        session, before = self.session, len(self.session.record.effective)
        products: list[Product] = []

        def compiler(gm: Any, inputs: Any) -> Any:
            products.append(compile_one(gm, inputs, session, whole=True))
            return products[-1].call()

        if session.plan.lowering.how == "auto" and all(t.is_cpu for t in self.watch.tensors):
            kernels.build_ahead()
        traced = trace(self.method, args, kwargs, compiler, self.dynamic)
        record = session.record
        entry = made(
            traced, products[-1], self.method.__func__, digest=self.watch.digest,
            record=record.graphs[-1], effective=record.effective[before:],
        )  # fmt: skip
        entry.settle(self.watch, found)
        self._save(entry, args, kwargs, found)
        return entry

    def _save(self, entry: Entry, args: Any, kwargs: Any, found: Locals) -> None:
        try:
            path = self._folder() / f"{Describer().digest([args, kwargs])}.bin"
            failed = disk.write(path, entry.dump(found))
        except (CannotDump, Opaque) as error:
            failed = str(error)
        if failed:
            log.info("%s is not kept on disk: %s", entry.record.name, failed)

    def _releases(self) -> bool:
        wanted = self.session.plan.weights
        return wanted is not None and wanted.releasing

    def _release_after(self, product: Product) -> None:
        """Give originals back once the graph's first call has its packed weights."""
        wanted = self.session.plan.weights
        if wanted is None or not self._releases():
            return

        def release(args: Any) -> None:
            done, stay = release_packed(self.model, product, args, wanted.released(), self.read)
            if done or stay:
                why = (
                    "the others are read as they are too" if stay else "the packed copies are read"
                )
                got = f"{done} weights given back, {len(stay)} kept"
                self.session.record.effective.append(Effective("weights: release", got, why))

        product.folded = release

    def _report(self, entry: Entry) -> None:
        """A call from disk is told as fully as one that was compiled here."""
        record = self.session.record
        entry.record.name = f"graph{len(record.graphs)}"
        entry.record.from_disk = True
        record.graphs.append(entry.record)
        tell(entry.record.name, "ready", counted(len(entry.record.sites), "rewrite"), cached=True)
        record.effective.extend(entry.effective)
        check_once(self.session)

    def _give_up(self, why: str) -> None:
        self.given_up = why
        log.info("Dynamo dispatches %s: %s", type(self.model).__name__, why)
        self.session.record.effective.append(
            Effective("direct dispatch and warm starts", "Dynamo's own dispatch", why)
        )


def _hooked(model: nn.Module) -> bool:
    return bool(model._forward_hooks or model._forward_pre_hooks or model._backward_hooks)


def _elsewhere() -> bool:
    """Whether someone else wants to see this call as Python: a tracer, a mode, a stance, a transform."""
    dynamo = torch._dynamo
    return (
        torch.compiler.is_compiling()
        or dynamo.eval_frame._stance.stance != "default"
        or bool(dynamo.config.disable)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
    )
