"""`torch.compile(model, backend="sits").generate()` runs the compiled model.

torch hands `generate` of a compiled module to the module inside, whose `forward` is not compiled: the speed-up is
lost without a word. For modules compiled with this backend, `generate` runs with the compiled call in place.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch._dynamo.eval_frame import OptimizedModule

_LOCK = threading.RLock()


def compiled_by(ctx: Any, backend: Any) -> bool:
    """Whether a Dynamo context ends in `backend`, through whatever wraps it."""
    link, seen = getattr(ctx, "callback", None), 0
    while link is not None and seen < 20:
        if link is backend or getattr(link, "compiler_fn", None) is backend:
            return True
        link, seen = getattr(link, "_torchdynamo_orig_backend", None), seen + 1
    return False


def install(backend: Any) -> None:
    """Teach OptimizedModule once. Other backends' modules are untouched."""
    original = OptimizedModule.__getattr__
    if getattr(original, "_sits", False):
        return

    @functools.wraps(original)
    def __getattr__(self: Any, name: str) -> Any:
        value = original(self, name)
        if name == "generate" and compiled_by(self.dynamo_ctx, backend):
            return functools.wraps(value)(functools.partial(_generate, self, value))
        return value

    __getattr__._sits = True  # type: ignore[attr-defined]
    OptimizedModule.__getattr__ = __getattr__  # type: ignore[method-assign]


def _generate(outer: Any, generate: Any, *args: Any, **kwargs: Any) -> Any:
    model = outer._orig_mod
    with _LOCK:
        depth = model.__dict__.get("_sits_generating", 0)
        if depth == 0:
            model.__dict__["_sits_before"] = model._compiled_call_impl
            model._compiled_call_impl = outer.dynamo_ctx(model._call_impl)
        model.__dict__["_sits_generating"] = depth + 1
    try:
        return generate(*args, **kwargs)
    finally:
        with _LOCK:
            model.__dict__["_sits_generating"] -= 1
            if model.__dict__["_sits_generating"] == 0:
                model._compiled_call_impl = model.__dict__.pop("_sits_before")
                del model.__dict__["_sits_generating"]
