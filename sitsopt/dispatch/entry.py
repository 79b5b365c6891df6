"""One compiled call: when it may be used, how it runs, and itself as bytes."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..rewrite.record import Effective, GraphRecord
from ..runtime.product import CannotDump, Product
from .describe import program
from .inputs import Inputs
from .settings import files_digest
from .trace import Code, Locals, Traced, containers, load_guards
from .watch import Watch

MISSING = object()


class Stale(RuntimeError):
    """An entry that is whole and does not belong to this process; the text says what differs."""


@dataclass
class Entry:
    """`guards` read the call's arguments and torch's state; `names` the functions and classes that the trace has
    read, as expressions over L (locals) and G (globals); the watch does the rest."""

    guards: Any
    guards_state: bytes
    code: Code
    product: Product
    inputs: Inputs
    run: Callable[..., Any]
    short: Callable[..., Any] | None  # for inputs that are known
    scope: dict[str, Any]
    names: list[str]
    files: frozenset[str]
    digest: str
    record: GraphRecord
    effective: list[Effective] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)  # what the names meant
    turn: int = -1
    fits: bool = False

    def usable(self, watch: Watch, found: Locals) -> bool:
        """Whether this call may run it."""
        if self.turn == watch.turn and not self.fits:
            return False
        if not self.guards.check(found):
            return False
        if (
            self.turn != watch.turn
        ):  # only now: what the names mean can be said of such a call alone
            same = [a is b for a, b in zip(self._look(found), self.seen, strict=True)]
            self.fits = self.digest == watch.digest and all(same)
            self.turn = watch.turn
        return self.fits

    def __call__(self, watch: Watch, found: Locals, *args: Any, **kwargs: Any) -> Any:
        """Run it, for the model and the call's arguments. Raises SharesStorage."""
        if self.short is None:
            return self.run(*args, **kwargs)
        if self.inputs.use(watch.turn, found):
            return self.short(*args, **kwargs)
        return self.inputs.learning(lambda: self.run(*args, **kwargs), watch, found)

    def settle(self, watch: Watch, found: Locals) -> None:
        """Note what the names mean now; call it while the entry is right."""
        self.seen = self._look(found)
        watch.also([self.scope, *(m.__dict__ for m in self.code.modules().values())])
        self.turn, self.fits = watch.turn, self.digest == watch.digest

    def _look(self, found: Locals) -> list[Any]:
        return [_value(name, self.scope, found) for name in self.names]

    def dump(self, found: Locals) -> bytes:
        """The entry as bytes. Raises CannotDump."""
        from torch._dynamo.package import SerializedCode

        seen = self._look(found)
        lost = [name for name, value in zip(self.names, seen, strict=True) if value is MISSING]
        if lost:
            raise CannotDump(f"what {lost[0]} means cannot be looked up")
        if self.record.grad:
            raise CannotDump("gradients are recorded")
        try:
            parts = {
                "meaning": [*map(program, seen)],
                "files": files_digest(sorted(self.files)),
                "code": replace(self.code, code=SerializedCode.from_code_object(self.code.code)),
                "product": self.product.dump(),
            }
        except OSError as error:
            raise CannotDump(str(error)) from error
        for name in ("guards_state", "names", "digest", "record", "effective"):
            parts[name] = getattr(self, name)
        parts["paths"] = sorted(self.files)
        try:
            return pickle.dumps(parts)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise CannotDump(f"{type(error).__name__}: {error}") from error


def made(traced: Traced, product: Product, forward: types.FunctionType, **facts: Any) -> Entry:
    """The entry for a call that was just captured and compiled."""
    return Entry(
        guards=traced.guards,
        guards_state=traced.guards_state,
        code=traced.code,
        product=product,
        **_callables(traced.code, forward, product),
        scope=traced.code.scope(forward),
        names=traced.left_out,
        files=traced.files,
        **facts,
    )


def load(data: bytes, forward: types.FunctionType, found: Locals) -> Entry:
    """An entry from bytes, for a call with these locals. Raises Stale, and anything that unpickling raises."""
    from torch._dynamo.package import SerializedCode

    parts = pickle.loads(data)
    if files_digest(parts["paths"]) != parts["files"]:
        raise Stale("the model's code has changed")
    code: Code = replace(parts["code"], code=SerializedCode.to_code_object(parts["code"].code))
    scope = code.scope(forward)
    code.reserve()
    seen = [_value(name, scope, found) for name in parts["names"]]
    for name, value, meant in zip(parts["names"], seen, parts["meaning"], strict=True):
        if program(value) != meant:
            raise Stale(f"{name} is another one now: {program(value)}, not {meant}")
    guards = load_guards(parts["guards_state"], forward.__code__, scope)
    if not guards.check(found):  # before the rest is loaded: most of an entry is its graph
        raise Stale("it is for other arguments")
    product = Product.load(parts["product"])
    return Entry(
        guards=guards,
        guards_state=parts["guards_state"],
        code=code,
        product=product,
        **_callables(code, forward, product),
        scope=scope,
        names=parts["names"],
        files=frozenset(map(str, map(Path, parts["paths"]))),
        digest=parts["digest"],
        record=parts["record"],
        effective=parts["effective"],
    )


def _callables(code: Code, forward: types.FunctionType, product: Product) -> dict[str, Any]:
    inputs = Inputs(product.call(), containers(forward))
    run, short = code.bind(forward, inputs.graph)
    return {"inputs": inputs, "run": run, "short": short}


def _value(name: str, scope: dict[str, Any], found: Locals) -> Any:
    """What a guarded name means; MISSING where it means nothing (any more)."""
    from torch._dynamo.guards import _get_closure_vars

    try:
        return eval(name, {**_get_closure_vars(), **found, "L": found, "G": scope})
    except Exception:
        return MISSING
