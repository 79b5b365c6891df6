"""What is known about each model that was compiled: its settings, its record, its expectations.

Dynamo hands the backend one graph at a time; a session gathers the graphs of one model (or function), so that
`report` can tell the whole story and `expect` can be checked over all of them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import GraphModule

from .options import Options
from .pipeline import Plan
from .rewrite.record import Record


@dataclass
class Session:
    """One model or function under one set of options."""

    owner: Callable[[], Any]  # a weak reference to the module, or the code object of a function
    options: Options
    plan: Plan
    record: Record
    recipe: Any = None
    target: Any = None
    checked: bool = False
    failure: Exception | None = None
    extra: dict[str, Any] = field(default_factory=dict)


_LOCK = threading.RLock()
_SESSIONS: OrderedDict[tuple[Any, ...], Session] = OrderedDict()
_MOST = 256  # sessions kept; the oldest go first


def find_or_make(
    owner: Any, options: Options, mode: str | None, make: Callable[[], Session]
) -> Session:
    """The session of `owner` under its options, made on first use. Safe from several threads."""
    key = (id(owner), repr(options), mode)
    with _LOCK:
        session = _SESSIONS.get(key)
        if session is None or session.owner() is not owner:
            session = make()
            _SESSIONS[key] = session
            while len(_SESSIONS) > _MOST:
                _SESSIONS.popitem(last=False)
        _SESSIONS.move_to_end(key)
        return session


def sessions_of(owner: Any) -> list[Session]:
    """Sessions of a module, a compiled module or a function, the latest last; all of them for None."""
    owner = getattr(owner, "_orig_mod", owner)
    owner = getattr(owner, "_torchdynamo_orig_callable", owner)
    owner = getattr(owner, "__code__", owner) if not isinstance(owner, nn.Module) else owner
    with _LOCK:
        everything = list(_SESSIONS.values())
    if owner is None:
        return everything
    inside = set(map(id, owner.modules())) if isinstance(owner, nn.Module) else {id(owner)}
    return [s for s in everything if s.owner() is not None and id(s.owner()) in inside]


def clear() -> None:
    """Forget every session (tests)."""
    with _LOCK:
        _SESSIONS.clear()


def owner_of(gm: GraphModule) -> Any:
    """The module whose frame Dynamo is compiling, or the code object of a plain function.

    Read from Dynamo's current translator; where that is not to be had, the graph module itself stands in.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        frame = InstructionTranslator.current_tx()
        args = frame.f_locals.get("args") or ()  # of a decorated method
        first = next(iter(frame.f_locals.values()), None)
        for own in (
            frame.f_locals.get("self"),
            first,
            args[0] if isinstance(args, tuple) and args else None,
        ):
            if isinstance(own, nn.Module):
                return own
        return _written(frame.f_code)
    except (ImportError, AttributeError):
        return gm


def _written(code: Any) -> Any:
    """The code the user wrote: behind a break in the graph, Dynamo runs the rest of it as code of its own."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    made = ContinueExecutionCache.generated_code_metadata
    while code in made:
        code = made[code].code
    return code


def weak(owner: Any) -> Callable[[], Any]:
    """A weak reference, or a strong one to what cannot have any (a code object)."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def ends_the_call(gm: GraphModule) -> bool:
    """Whether no graph break follows this graph: then the graphs of a full call are complete."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and not reason.graph_break
