"""Conditions of `where`: a small language of comparisons, parsed from a whitelist and never run as Python.

    tree = parse_condition("T in {f16, bf16} and H % 8 == 0", pos)
    evaluate(tree, env)     # True, False, or None where it cannot be known
    explain(tree, env)      # `H % 8 == 0` with H = 13

What names and functions mean is the environment's business, so that sizes may be numbers or symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .arith import apply
from .cond_parse import parse_condition
from .cond_tree import NUMERIC, Compare, Cond, Const, Fn, In, Logic, Name, Op
from .errors import SpecError

__all__ = ["Cond", "Env", "EvalError", "evaluate", "explain", "parse_condition"]

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


class Env(Protocol):
    """What a condition is read against. Dtypes are their short names, as text."""

    def name(self, name: str) -> Any:
        """The value of a size, a dtype, a constant, an input, or of `target.FACT`."""

    def call(self, fn: str, args: list[Any]) -> Any:
        """The value of one of FUNCTIONS; a tensor argument is what `name` gives for it."""

    def truth(self, value: Any) -> bool | None:
        """Whether a value holds; None where that cannot be known, as for some symbolic sizes."""


class EvalError(SpecError):
    """A condition that has no value: a division by zero, a comparison of text with a number."""


def evaluate(tree: Cond, env: Env) -> bool | None:
    """Whether the condition holds: True, False, or None where that cannot be known.

    Raises EvalError where it has no value at all.
    """
    match tree:
        case Logic(op="not", args=(part,)):
            return _negated(evaluate(part, env))
        case Logic(op=op, args=parts):
            return _joined(op, (evaluate(part, env) for part in parts))
        case Compare():
            values = [_value(operand, env) for operand in tree.operands]
            pairs = zip(tree.ops, values, values[1:], strict=False)
            return _joined("and", (_compared(tree, op, a, b, env) for op, a, b in pairs))
        case In():
            value = _value(tree.item, env)
            members = [_value(member, env) for member in tree.members]
            found = _joined("or", (_compared(tree, "==", value, member, env) for member in members))
            return _negated(found) if tree.negated else found
        case _:
            return _truth(tree, _value(tree, env), env)


def explain(tree: Cond, env: Env) -> str:
    """What was found where the condition fails or cannot be known: `H % 8 == 0` with `H = 13`."""
    part = _culprit(tree, env)
    found: dict[str, str] = {}
    for node in part.walk():
        if isinstance(node, Name) or (isinstance(node, Fn) and node.fn not in NUMERIC):
            found[node.text] = _found(node, env)
    inner = {name for node in part.walk() if isinstance(node, Fn) and node.fn not in NUMERIC
             for name in node.names()}  # fmt: skip
    shown = [f"{text} = {value}" for text, value in found.items() if text not in inner]
    return f"`{part.text}`" + (f" with {', '.join(shown)}" if shown else "")


def _culprit(tree: Cond, env: Env) -> Cond:
    """The smallest part that decides the outcome."""
    if isinstance(tree, Logic) and tree.op == "and":
        outcome = evaluate(tree, env)
        for part in tree.args:
            if outcome is not True and evaluate(part, env) is outcome:
                return _culprit(part, env)
    return tree


def _found(node: Cond, env: Env) -> str:
    try:
        value = _value(node, env)
    except EvalError as error:
        return f"({error.problem})"
    return repr(value) if isinstance(value, str) and isinstance(node, Fn) else str(value)


def _negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def _joined(op: str, values: Iterator[bool | None]) -> bool | None:
    """Three-valued `and` and `or`: an unknown part decides nothing, and hides no part that does."""
    decisive, unknown = op == "or", False
    for value in values:
        if value is decisive:
            return decisive
        unknown = unknown or value is None
    return None if unknown else not decisive


def _compared(tree: Cond, op: str, a: Any, b: Any, env: Env) -> bool | None:
    equality = op in ("==", "!=")
    if (a is None or b is None or isinstance(a, str) != isinstance(b, str)) and equality:
        return (a is b) == (op == "==")
    if a is None or b is None:
        raise EvalError(tree.pos, f"`{tree.text}` compares a value that is absent")
    try:
        return _truth(tree, COMPARISONS[op](a, b), env)
    except TypeError:
        raise EvalError(tree.pos, f"`{tree.text}` compares {a!r} with {b!r}") from None


def _truth(tree: Cond, value: Any, env: Env) -> bool | None:
    if isinstance(value, bool):
        return value
    if value is None or isinstance(value, str | int | float | list | tuple):
        raise EvalError(tree.pos, f"`{tree.text}` is {value!r}, neither true nor false")
    return env.truth(value)


def _value(tree: Cond, env: Env) -> Any:
    match tree:
        case Const():
            return tree.value
        case Name():
            return env.name(tree.name)
        case Fn() if tree.fn not in NUMERIC:
            return env.call(tree.fn, [_value(arg, env) for arg in tree.args])
        case Fn(fn=op, args=args) | Op(op=op, args=args):
            try:
                return apply(op, [_value(arg, env) for arg in args])
            except ArithmeticError as error:
                raise EvalError(tree.pos, f"`{tree.text}` has no value: {error}") from None
        case _:
            return evaluate(tree, env)
