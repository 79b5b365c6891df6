"""Pointwise kernels that models need often, by name."""

from __future__ import annotations

from ..expr import Elementwise, Expr, Input, Operand, Scalar, apply

_a, _b, _c = Input("a"), Input("b"), Input("c")
_s = Scalar("s")

_DENSE: dict[str, Expr] = {
    "add": apply("add", _a, _b),
    "swiglu": apply("mul", apply("silu", _a), _b),
    "geglu": apply("mul", apply("gelu", _a), _b),
    "geglu_tanh": apply("mul", apply("gelu_tanh", _a), _b),
    "softcap": apply("mul", apply("tanh", apply("div", _a, _s)), _s),
}
# Expression, and the strides of a, b and c over [rows, columns].
_STRIDED: dict[str, tuple[Expr, tuple[str, ...]]] = {
    "swiglu_halves": (_DENSE["swiglu"], ("?1", "?1")),
    "bias_gelu": (apply("gelu", apply("add", _a, _b)), ("?1", "01")),
    "scale_shift": (apply("add", apply("mul", _a, _b), _c), ("?1", "01", "01")),
}
FORMS = (*_DENSE, *_STRIDED)


def form(name: str, dtype: str, wide: bool = False) -> Elementwise:
    """The kernel of a name; every input and the output has one dtype."""
    tail = f"{name}_{dtype}" + "_wide" * wide
    expr, strides = _STRIDED.get(name) or (_DENSE[name], ("", "", ""))
    used = [n for n in ("a", "b", "c") if f"'{n}'" in repr(expr)]
    inputs = tuple(Operand(n, dtype, strides[i]) for i, n in enumerate(used))
    scalars = ("s",) if "Scalar" in repr(expr) else ()
    return Elementwise(tail, 2, inputs, ((Operand("y", dtype), expr),), scalars, wide)
