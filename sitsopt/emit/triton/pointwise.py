"""Triton text of one pointwise expression on values that are loaded already."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..expr import Apply, Const, Expr, Input, steps
from .source import TL, Writer

# Only what every backend and the interpreter have. tanh: a series near 0, where 1 - 2 / (e^2x + 1) cancels.
_FORMS = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "reciprocal": "1.0 / {0}",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "floor": "tl.floor({0})",
    "tanh": "tl.where(tl.abs({0}) < 0.2, {0} * (1.0 + {0} * {0} * (-0.3333333333333333 + {0} * {0} * "
    "(0.13333333333333333 - {0} * {0} * 0.05396825396825397))), 1.0 - 2.0 / (tl.exp(2.0 * {0}) + 1.0))",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "silu": "{0} / (1.0 + tl.exp(-{0}))",
    "relu": "tl.where({0} < 0.0, 0.0, {0})",
    "gelu": "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    "gelu_tanh": "{0} / (1.0 + tl.exp({0} * (-1.5957691216057308 - 0.07135481282052124 * {0} * {0})))",
    "not": "{0} == 0.0",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "where": "tl.where({0}, {1}, {2})",
}


def render(write: Writer, roots: Sequence[Expr], values: Mapping[str, str]) -> list[str]:
    """Writes the steps of the expressions; returns what each root is called.

    values: for every input and scalar, the name of its f32 (or boolean) value.
    """
    known: dict[Expr, str] = {}
    for expr in steps(roots):
        if isinstance(expr, Const):
            known[expr] = literal(expr.value)
        elif isinstance(expr, Apply):
            name = f"v{sum(n.startswith('v') for n in known.values())}"
            write(f"{name} = {_form(expr.op, [known[a] for a in expr.args])}")
            known[expr] = name
        else:
            known[expr] = values[expr.name] if isinstance(expr, Input) else expr.name
    return [known[root] for root in roots]


def _form(op: str, args: list[str]) -> str:
    if op.startswith("cast:"):
        dtype = op.removeprefix("cast:")
        return args[0] if dtype == "f32" else f"{args[0]}.to({TL[dtype]}).to(tl.float32)"
    return _FORMS[op].format(*args)


def activation(op: str, value: str) -> str:
    """The text of a unary operation on a name."""
    return _FORMS[op].format(value)


def literal(value: float) -> str:
    """A number as kernel text; a NaN and the infinities have names only as strings."""
    if math.isnan(value) or math.isinf(value):
        return f'float("{value}")'
    text = repr(value)
    return f"({text})" if value < 0 else text
