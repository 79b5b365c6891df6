"""A call in a pattern against the schema of its op: counts, keywords and plain kinds of arguments."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .errors import did_you_mean
from .ops import OpFact, resolve
from .program import Arith, DType, Lit, Ref, Seq, Term
from .pytext import PyText
from .signature import Arg, Signature

Kwargs = tuple[tuple[str, Term], ...]
KindOf = Callable[[str], str]  # a tensor, a list, a constant


def check_call(
    text: PyText, node: ast.Call, fact: OpFact, args: tuple[Term, ...], kwargs: Kwargs, kind: KindOf
) -> None:
    """Raise a SpecError when no overload of the op can take these arguments.

    The mistake told is that of the overload that fits furthest; `kind` says what a name stands for.
    """
    for index, keyword in enumerate(node.keywords):
        if keyword.arg in [name for name, _ in kwargs[:index]]:
            text.refuse(keyword, f"`{keyword.arg}` is given twice", "each argument once")
    plainest = sorted(fact.overloads, key=lambda name: name not in ("default", "Tensor"))
    mistakes = [_mistake(node, fact, fact.overloads[name], args, kwargs, kind) for name in plainest]
    if mistakes and all(mistakes):
        furthest = max((one for one in mistakes if one), key=lambda one: one.progress)
        text.refuse(furthest.node, furthest.problem, furthest.expected, furthest.hint)


@dataclass(frozen=True)
class _Mistake:
    progress: int  # how far the overload fitted
    node: ast.AST
    problem: str
    expected: str
    hint: str = ""


def _mistake(
    node: ast.Call, fact: OpFact, signature: Signature, args: tuple[Term, ...], kwargs: Kwargs,
    kind: KindOf,
) -> _Mistake | None:  # fmt: skip
    shown, numbers = f"{fact.name}{signature}", _number_args(fact)
    positional = signature.positional
    if len(args) > len(positional):
        count = len(positional)
        problem = (
            f"{fact.name} takes {count} argument{'s' * (count != 1)} by position, not {len(args)}"
        )
        return _Mistake(0, node.args[count], problem, shown)
    given = {
        arg.name: (term, at) for arg, term, at in zip(positional, args, node.args, strict=False)
    }
    for (name, term), keyword in zip(kwargs, node.keywords, strict=True):
        if name in given:
            return _Mistake(1, keyword, f"{fact.name} gets `{name}` by position and by name", shown)
        if signature.arg(name) is None:
            hint = did_you_mean(name, [arg.name for arg in signature.args])
            return _Mistake(1, keyword, f"{fact.name} has no argument `{name}`", shown, hint)
        given[name] = (term, keyword.value)
    for arg in signature.args:
        if arg.required and arg.name not in given:
            return _Mistake(2, node, f"{fact.name} misses its argument `{arg.name}`", shown)
        if arg.name in given and not _fits(given[arg.name][0], arg, kind, numbers):
            term, at = given[arg.name]
            problem = f"`{arg.name}` of {fact.name} cannot be {_shown(term, kind)}"
            return _Mistake(3, at, problem, f"{arg.type} {arg.name}")
    return None


def _fits(term: Term, arg: Arg, kind: KindOf, numbers: Collection[str] = ()) -> bool:
    """False only where the kind of the term is certain and no value of it fits."""
    if isinstance(term, Seq):
        inner = Arg(arg.name, arg.type.removesuffix("?").removesuffix("[]"))
        return arg.is_list and all(_fits(item, inner, kind) for item in term.items)
    if isinstance(term, Lit) and term.value is None:
        return arg.takes_none
    if isinstance(term, Ref):
        if kind(term.name) == "a constant":
            return not arg.is_tensor or arg.name in numbers  # its type is known only in a match
        wants_list = arg.is_list and arg.is_tensor
        return arg.base in ("Tensor", "Scalar") and wants_list == (kind(term.name) == "a list")
    if isinstance(term, Arith):
        return arg.base in ("Scalar", "int", "float") or arg.name in numbers
    return arg.base in _LITERALS[_shown(term, kind)] or (
        arg.name in numbers and not isinstance(term.value, str | DType)
    )


def _number_args(fact: OpFact) -> set[str]:
    """Arguments that another overload takes as a number: graphs pass a number to `mul.Tensor` too."""
    whole = resolve(fact.key) or fact
    args = [arg for signature in whole.overloads.values() for arg in signature.args]
    return {arg.name for arg in args if arg.base == "Scalar"}


_LITERALS = {
    "text": {"str", "Device", "Layout", "MemoryFormat"},
    "a dtype": {"ScalarType"},
    "true or false": {"bool", "Scalar", "int"},
    "a whole number": {"int", "float", "Scalar"},
    "a number": {"float", "Scalar"},
}


def _shown(term: Term, kind: KindOf) -> str:
    if isinstance(term, Seq):
        return "a list"
    if isinstance(term, Ref):
        return kind(term.name)
    if isinstance(term, Arith):
        return "a number"
    if isinstance(term.value, str):
        return "text"
    if isinstance(term.value, DType):
        return "a dtype"
    if isinstance(term.value, bool):
        return "true or false"
    if term.value is None:
        return "None"
    return "a whole number" if isinstance(term.value, int) else "a number"
