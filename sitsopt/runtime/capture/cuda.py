"""The GPU behind an executor. What torch 2.11 to 2.14 ask of a capture is done here and nowhere else:

* the call before the capture runs on the stream that will be captured: handles and workspaces belong to a stream;
* workspaces of cuBLAS go before and behind a capture: one made inside lies in the capture's own pool, and would be
  used outside of it, after the pool has given the memory to something else;
* garbage is collected before, and not during: a tensor that is freed inside is an error (`hooks.streams`);
* only this thread's unsafe calls end the capture ("thread_local"): others may allocate meanwhile;
* captures of one function share a pool. They never run at once, and their results are copied before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..hooks.streams import capture_window


class Cuda:
    """One device. All its captures share a memory pool and a stream."""

    def __init__(self, index: int | None = None, sides: int = 0) -> None:
        self.index = torch.cuda.current_device() if index is None else index
        self.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.index):
            self.stream = torch.cuda.Stream()
            self.sides = [torch.cuda.Stream() for _ in range(sides)]

    def busy(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def warm(self, call: Callable[[], Any]) -> Any:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = call()
        torch.cuda.current_stream().wait_stream(self.stream)
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream())
        return result

    def capture(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with capture_window(torch.cuda, (self.stream, *self.sides)), torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):  # fmt: skip
                result = call()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return graph, result

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self.index))

    def on(self, number: int) -> Any:
        """A context in which work goes to a stream of a region; 0 is the current one. Outside of a capture all work
        stays there: memory of a side stream would be given away while another stream still reads it."""
        aside = number and torch.cuda.is_current_stream_capturing()
        return torch.cuda.stream(self.sides[number - 1]) if aside else nullcontext()

    def record(self) -> Any:
        """An event behind everything on the current stream."""
        return torch.cuda.current_stream().record_event()

    def wait(self, events: Sequence[Any]) -> None:
        """Let the current stream wait for events."""
        for event in events:
            torch.cuda.current_stream().wait_event(event)
