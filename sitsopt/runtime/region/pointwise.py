"""ATen's elementwise ops as C expressions over one element each.

Each op is computed in f32 (or in integers) and rounded to its dtype, as ATen does it op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...emit.cpp.region import Index, Lazy, Operand, broadcast, number
from ...graph.facts import DTYPE_NAMES

aten = torch.ops.aten
Text = Callable[..., str]
COSTLY = 8  # of a transcendental function, in ops
FLOATS = ("f32", "bf16")

_UNARY: dict[str, tuple[str, int]] = {
    "neg": ("(-{0})", 1),
    "abs": ("fabsf({0})", 1),
    "relu": ("({0} > 0.0f || {0} != {0} ? {0} : 0.0f)", 2),
    "rsqrt": ("(1.0f / sqrtf({0}))", 4),
    "sqrt": ("sqrtf({0})", 4),
    "reciprocal": ("(1.0f / {0})", 2),
    "exp": ("exp_f32({0})", COSTLY),
    "sigmoid": ("sigmoid_f32({0})", COSTLY),
    "silu": ("silu_f32({0})", COSTLY),
    "tanh": ("tanh_f32({0})", COSTLY),
    "erf": ("erff({0})", COSTLY),
    "cos": ("cosf({0})", COSTLY),
    "sin": ("sinf({0})", COSTLY),
    "logical_not": ("({0} == 0)", 1),
    "bitwise_not": ("({0} == 0)", 1),  # of truth values alone
}
_BINARY: dict[str, str] = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "logical_and": "({0} != 0 && {1} != 0)",
    "bitwise_and": "({0} & {1})",
    "__and__": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "__or__": "({0} | {1})",
    "maximum": "most({0}, {1})",
    "minimum": "least({0}, {1})",
}
_POWERS = {0.5: ("sqrtf({0})", 4), -0.5: ("(1.0f / sqrtf({0}))", 4), 1: ("{0}", 0), 2: ("square({0})", 1),
           3: ("cube({0})", 2), -1: ("(1.0f / {0})", 2)}  # fmt: skip


def known(name: str) -> bool:
    """Whether `expression` may have an answer for an ATen op of this name."""
    return name in _UNARY or name in _BINARY or name in ("pow", "gelu", "where", "_to_copy")


def expression(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], like: torch.Tensor
) -> Lazy | str:
    """The op's result, of `like`'s dtype and sizes; or why it cannot be written. Tensors in args are operands."""
    name = target._schema.name.split("::")[1]
    dtype = DTYPE_NAMES.get(like.dtype, str(like.dtype))
    if dtype not in ("f32", "bf16", "i64", "bool"):
        return f"{dtype} values"
    found = _template(name, target, args, kwargs)
    if isinstance(found, str):
        return found
    template, cost, operands = found
    wide = any(_is_float(o) for o in operands) or dtype in FLOATS
    return _lazy(template, cost, operands, dtype, tuple(like.shape), wide)


def _template(
    name: str, target: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[str, int, list[Any]] | str:
    operands = list(args[:2])
    if name == "_to_copy":
        return "{0}", 0, list(args[:1])
    if name == "where" and len(args) == 3:
        return "({0} != 0 ? {1} : {2})", 1, list(args)
    if name == "gelu":
        how = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
        return f"gelu_{'tanh' if how == 'tanh' else 'erf'}({{0}})", COSTLY, list(args[:1])
    if name == "pow":
        if not isinstance(args[1], (int, float)) or args[1] not in _POWERS:
            return f"a power of {args[1]}"
        template, cost = _POWERS[args[1]]
        return template, cost, list(args[:1])
    if name in _UNARY:
        template, cost = _UNARY[name]
        return template, cost, list(args[:1])
    if name == "div" and kwargs.get("rounding_mode"):
        return "a division that rounds to integers"
    if kwargs.get("alpha", args[2] if len(args) > 2 else 1) != 1:
        return "a sum with a factor"
    if name in _BINARY and len(operands) == 2:
        return _BINARY[name], 1, operands
    return f"{target}"


def _is_float(operand: Any) -> bool:
    if isinstance(operand, (bool, int)):
        return False
    return isinstance(operand, float) or operand.dtype in FLOATS


def _lazy(
    template: str, cost: int, operands: list[Any], dtype: str, sizes: tuple[int, ...], wide: bool
) -> Lazy:
    tensors: list[Operand] = [o for o in operands if not isinstance(o, (bool, int, float))]

    def text(index: Index) -> str:
        return template.format(*(_element(o, index, wide) for o in operands))

    homes = frozenset(h for t in tensors for h in t.reads())
    total = cost + sum(t.cost for t in tensors if isinstance(t, Lazy))
    return Lazy(dtype, sizes, text, homes, total)


def _element(operand: Any, index: Index, wide: bool) -> str:
    if isinstance(operand, (bool, int, float)):
        return number(float(operand)) if wide else number(operand)
    text = operand.read(broadcast(operand, index))
    return f"(float)({text})" if wide and operand.dtype not in FLOATS else text
