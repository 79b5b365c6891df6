"""The `sits::` ops on a GPU: `sits_triton::` ops into which Inductor looks, down to the kernels and their grids.

Each takes the arguments of its `sits::` op and `texts`, a digest of the kernels that it launches: a compiled graph is
kept on disk under its ops and arguments, and must not outlive the texts it was made from.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.library import triton_op, wrap_triton

from sitsopt.emit.triton.source import Source

from ...graph import ops as _reference_ops  # noqa: F401  the schemas
from .module import digest, load
from .runner import Runner
from .sites import SITES

# In the spelling that every supported PyTorch knows.
_TYPES: dict[str, Any] = {
    "Tensor": torch.Tensor, "Optional[Tensor]": typing.Optional[torch.Tensor],  # noqa: UP045
    "List[Tensor]": typing.List[torch.Tensor],  # noqa: UP006
    "List[Optional[Tensor]]": typing.List[typing.Optional[torch.Tensor]],  # noqa: UP006, UP045
    "float": float, "int": int, "bool": bool, "str": str,
}  # fmt: skip
_fitted: dict[Source, Source] = {}


def settle(asked: Source, fitted: Source) -> None:
    """From now on `asked` runs at the block sizes of `fitted`."""
    _fitted[asked] = fitted


def start(source: Source, grid: tuple[int, ...], args: list[Any]) -> None:
    """Launches a kernel, or records it in the graph that is being traced."""
    kernel = wrap_triton(load(source.text, source.name))
    kernel[grid](
        *args, **dict(source.constants), num_warps=source.warps, num_stages=source.stages
    )  # fmt: skip


def runner(device: torch.device) -> Runner:
    """Launches on a device, at the block sizes that were settled for it."""
    return Runner(start, lambda source: _fitted.get(source, source), _units(device))


@cache
def _units(device: torch.device) -> int:
    if not torch.cuda.is_available():
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def texts(sources: Sequence[Source]) -> str:
    """A digest of kernels, their block sizes included."""
    return digest(*(repr((s.text, s.constants, s.warps, s.stages)) for s in sources))


def _define(name: str, body: Callable[..., Any]) -> Any:
    """The op. Its signature comes from the schema of `sits::name`: PyTorch reads it off the function."""

    def run(*args: Any, texts: str = "", **kwargs: Any) -> Any:
        return body(runner(_device(args)), *args, **kwargs)

    schema = getattr(torch.ops.sits, name).default._schema
    params = [
        inspect.Parameter(
            a.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_TYPES[str(a.type)],
            default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
        )
        for a in schema.arguments
    ]  # fmt: skip
    params.append(
        inspect.Parameter("texts", inspect.Parameter.KEYWORD_ONLY, annotation=str, default="")
    )
    results = [_TYPES[str(r.type)] for r in schema.returns]
    returned = results[0] if len(results) == 1 else tuple[tuple(results)]  # type: ignore[misc]
    run.__signature__ = inspect.Signature(params, return_annotation=returned)  # type: ignore[attr-defined]
    run.__name__ = name
    return triton_op(f"sits_triton::{name}", run, mutates_args=())


def _device(args: tuple[Any, ...]) -> torch.device:
    return next(arg.device for arg in args if isinstance(arg, torch.Tensor))


_ops = {name: _define(name, body) for name, body in SITES.items()}


def on_device(name: str) -> Any:
    """The overload that runs `sits::name` on a GPU."""
    return getattr(torch.ops.sits_triton, name).default
