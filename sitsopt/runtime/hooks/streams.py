"""The hook `streams`: when a CUDA graph may be captured, which streams there are, and in what order kernels that do
not need each other are started."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...graph.regions.schedule import Launch, Work, schedule
from .facts import Facts
from .plan import Plan, Settings, Wanted

__all__ = ["Launch", "NotReady", "Streams", "Work", "capture_window", "pending", "schedule"]


class NotReady(RuntimeError):
    """A capture must not begin; the text says what is still pending."""


class Streams(Settings):
    """Plans stream priorities and the capture window. It sets nothing: a window is opened by who captures."""

    name = "streams"
    after = ("hbm",)

    def plan(self, facts: Facts, wanted: Wanted) -> Plan:
        plan = Plan(self.name)
        if not facts["gpu.count"]:
            why = facts.all["nvml"].problem or "there is no GPU"
            return plan.refuse("stream priorities and the capture window", why)
        cuda = _cuda()
        if cuda is None:
            return plan.refuse(
                "stream priorities and the capture window", "this torch has no CUDA device"
            )
        least, most = cuda.Stream.priority_range()
        plan.data["priorities"] = {"main": most, "side": least}
        plan.data["window"] = pending(cuda) or "may open now"
        return plan


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def pending(cuda: Any, streams: Sequence[Any] = ()) -> str:
    """Why a capture must not begin now, or nothing."""
    if not cuda.is_initialized():
        return "CUDA is not initialised: the first kernel would allocate inside the capture"
    if cuda.is_current_stream_capturing():
        return "a capture is going on already"
    busy = [
        place
        for place, stream in enumerate((cuda.current_stream(), *streams))
        if not stream.query()
    ]
    return f"work is pending on {len(busy)} of {1 + len(streams)} streams" if busy else ""


@contextmanager
def capture_window(cuda: Any, streams: Sequence[Any] = (), settle: bool = True) -> Iterator[None]:
    """Open while nothing can disturb a capture: garbage is collected (a tensor freed inside would be an error),
    streams are empty, and the collector stays off until the end. With `settle` pending work is waited for.

    Raises NotReady, also when the block itself left the stream capturing.
    """
    enabled = gc.isenabled()
    gc.collect()
    if settle and cuda.is_initialized() and not cuda.is_current_stream_capturing():
        cuda.synchronize()
    if why := pending(cuda, streams):
        raise NotReady(why)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
    if cuda.is_current_stream_capturing():
        raise NotReady("the capture was not ended")
