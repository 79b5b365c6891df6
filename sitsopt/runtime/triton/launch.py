"""Kernels launched on a GPU: the text is imported once, Triton compiles it at its first call.

The launch goes through Triton's own compiled-kernel cache; under a CUDA graph its cost is paid once.
"""

from __future__ import annotations

from typing import Any

from sitsopt.emit.triton.source import Source

from .module import load


def launch(source: Source, grid: tuple[int, ...], args: list[Any]) -> None:
    """Starts the kernel on the current stream of the tensors' device."""
    if 0 in grid:
        return
    kernel = load(source.text, source.name)
    kernel[grid](
        *args, **dict(source.constants), num_warps=source.warps, num_stages=source.stages,
        enable_fp_fusion=True,
    )  # fmt: skip
