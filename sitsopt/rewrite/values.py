"""Constants of rules and of graphs: arithmetic over them, and when two are the same."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import DTYPES, same_size, val
from ..spec.program import DType
from ..spec.rule import Input


def const_kinds(spec: Input) -> Any:
    """The types of what a `const` input may be bound to."""
    kinds: dict[str, Any] = {
        "float": (int, float), "int": (int, torch.SymInt), "bool": bool, "str": str,
        "dtype": torch.dtype, "ints": (list, tuple),
    }  # fmt: skip
    return kinds[spec.const_type or "float"]


def arithmetic(op: str, args: list[Any]) -> Any:
    """The notation's arithmetic over ints, floats and symbolic sizes."""
    a, b = args[0], args[1] if len(args) > 1 else None
    table = {
        "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b,
        "//": lambda: a // b, "%": lambda: a % b, "**": lambda: a**b, "neg": lambda: -a,
        "min": lambda: min(args), "max": lambda: max(args),
    }  # fmt: skip
    return table[op]()


def plain(value: Any) -> Any:
    """A constant of a rule as the graph would hold it: dtypes as torch's own."""
    return DTYPES[value.name] if isinstance(value, DType) else value


def symbolic(actual: Any) -> Any:
    """A size that arrives as a node, as the symbolic size it holds."""
    if isinstance(actual, Node) and isinstance(val(actual), (int, torch.SymInt)):
        return val(actual)
    return actual


def same_constant(a: Any, b: Any) -> bool:
    """Equality that tells True from 1, -0.0 from 0.0, and holds a symbolic size equal only when proved."""
    if a is b:
        return True
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(
            same_constant(x, symbolic(y)) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, (Node, str, torch.dtype, bool)) or isinstance(
        b, (Node, str, torch.dtype, bool)
    ):
        return type(a) is type(b) and bool(a == b)
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return (
            isinstance(a, (int, torch.SymInt))
            and isinstance(b, (int, torch.SymInt))
            and same_size(a, b)
        )
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        if a != a or b != b:
            return a != a and b != b
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return bool(a == b) if type(a) is type(b) else False
