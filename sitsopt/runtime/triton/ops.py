"""The `sits::` ops as ops that run generated Triton texts: `sits_interpret::` on CPU tensors, in the interpreter.

Each has the schema of its `sits::` op. What a call allocates is decided by the same function for real and for fake
tensors, so a traced graph knows the strides that a run will have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...graph import ops as _reference_ops  # noqa: F401  the schemas
from .runner import INTERPRETER, Recorder, Runner
from .sites import SITES

LIB = torch.library.Library("sits_interpret", "DEF")


def _define(name: str, body: Callable[..., Any]) -> None:
    schema = getattr(torch.ops.sits, name).default._schema
    LIB.define(str(schema).removeprefix("sits::"), tags=(torch.Tag.pt2_compliant_tag,))
    LIB.impl(name, partial(body, INTERPRETER), "CPU")
    torch.library.register_fake(f"sits_interpret::{name}", partial(_on_paper, body), lib=LIB)


def _on_paper(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return body(Runner(Recorder()), *args, **kwargs)


for _name, _body in SITES.items():
    _define(_name, _body)


def interpreted(name: str) -> Any:
    """The overload that runs `sits::name` in the interpreter."""
    return getattr(torch.ops.sits_interpret, name).default
