"""Arithmetic of rule files over whatever the values are: ints, floats, symbolic sizes. Bounded and total:
it computes a number or raises ArithmeticError, and never turns text or lists into something large."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

MAX_BITS = 4096

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "**": operator.pow,
}  # fmt: skip


def apply(op: str, args: Sequence[Any]) -> Any:
    """The value of `op` over `args`; `neg`, `abs`, `min` and `max` are ops too.

    Raises ArithmeticError for a division by zero, a value that is no number, or one that grows too big.
    """
    for arg in args:
        if arg is None or isinstance(arg, bool | str | bytes | list | tuple | dict | set):
            raise ArithmeticError(f"{arg!r} is no number")
    if op == "**":
        _check_power(args[0], args[1])
    try:
        value = _compute(op, args)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ArithmeticError(str(error)) from None
    if isinstance(value, complex) or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        raise ArithmeticError(f"the result of `{op}` is out of range")
    return value


def _compute(op: str, args: Sequence[Any]) -> Any:
    if op == "neg":
        return -args[0]
    if op == "abs":
        return abs(args[0])
    if op in ("min", "max"):
        return (min if op == "min" else max)(args)
    return BINARY[op](args[0], args[1])


def _check_power(base: Any, exponent: Any) -> None:
    """An int raised to an int can be of any size; everything else is of one machine word."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if base.bit_length() * exponent > MAX_BITS:
            raise ArithmeticError(f"{base} ** {exponent} is too large")
    elif not isinstance(exponent, int | float):
        raise ArithmeticError("an exponent that is not known")
