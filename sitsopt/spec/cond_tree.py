"""Conditions as trees: what may be said about the sizes, dtypes and values of a match."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from .errors import Pos

TENSOR, NUMBER = "tensor", "number"

FUNCTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "rank": ((TENSOR,), "number of dimensions"),
    "size": ((TENSOR, NUMBER), "length of one dimension"),
    "stride": ((TENSOR, NUMBER), "step of one dimension, in elements"),
    "numel": ((TENSOR,), "number of elements"),
    "contiguous": ((TENSOR,), "whether it lies row by row without gaps"),
    "dense": ((TENSOR,), "whether its elements lie without gaps or overlaps, in any order"),
    "dtype": ((TENSOR,), "its dtype"),
    "device": ((TENSOR,), "its device type, as text: cpu, cuda"),
    "users": ((TENSOR,), "how many nodes of the graph read it"),
    "is_param": ((TENSOR,), "whether it is a parameter or a buffer"),
    "is_const": ((TENSOR,), "whether its value is known when the graph is compiled"),
    "present": ((TENSOR,), "whether an optional input was given"),
    "requires_grad": ((TENSOR,), "whether a gradient is wanted for it"),
    "same_storage": ((TENSOR, TENSOR), "whether two values share memory"),
    "same_layer": (
        (TENSOR, TENSOR),
        "whether one layer of the model reads both, as far as is known",
    ),
    "expands": (
        (TENSOR, NUMBER),
        "whether it broadcasts to the sizes that follow; an absent input does",
    ),
    "at_most": (
        (NUMBER, NUMBER),
        "whether the first is proved to be no larger than the second; never a guard",
    ),
    "abs": ((NUMBER,), "absolute value"),
    "min": ((NUMBER, NUMBER), "the smallest of its arguments"),
    "max": ((NUMBER, NUMBER), "the largest of its arguments"),
}
VARIADIC = frozenset({"min", "max", "expands"})
NUMERIC = frozenset({"abs", "min", "max"})
BOOLEAN = frozenset({"contiguous", "dense", "is_param", "is_const", "present", "requires_grad",
                     "same_storage", "same_layer", "expands", "at_most"})  # fmt: skip


@dataclass(frozen=True)
class Cond:
    """A node of a condition. `text` is what was written, `pos` where."""

    text: str = field(kw_only=True, compare=False)
    pos: Pos = field(kw_only=True, compare=False, repr=False)

    def parts(self) -> Iterator[Cond]:
        """The nodes one level below."""
        for one in fields(self):
            value = getattr(self, one.name)
            yield from [
                v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Cond)
            ]

    def walk(self) -> Iterator[Cond]:
        """This node and all below, in the order written."""
        yield self
        for part in self.parts():
            yield from part.walk()

    def names(self) -> set[str]:
        """Every name read: sizes, dtypes, constants, inputs, and facts as `target.FACT`."""
        return {node.name for node in self.walk() if isinstance(node, Name)}


@dataclass(frozen=True)
class Const(Cond):
    """A number, a text, a truth value, None, or a dtype by its short name."""

    value: int | float | str | bool | None


@dataclass(frozen=True)
class Name(Cond):
    """A size, a dtype, a constant, an input, or `target.FACT`."""

    name: str


@dataclass(frozen=True)
class Fn(Cond):
    """One of FUNCTIONS."""

    fn: str
    args: tuple[Cond, ...]


@dataclass(frozen=True)
class Op(Cond):
    """Arithmetic: + - * / // % ** neg."""

    op: str
    args: tuple[Cond, ...]


@dataclass(frozen=True)
class Compare(Cond):
    """`a < b <= c`: one operator fewer than operands."""

    ops: tuple[str, ...]
    operands: tuple[Cond, ...]


@dataclass(frozen=True)
class In(Cond):
    """`a in {b, c}` or, negated, `a not in {b, c}`."""

    item: Cond
    members: tuple[Cond, ...]
    negated: bool = False


@dataclass(frozen=True)
class Logic(Cond):
    """`and`, `or` or `not` over its parts."""

    op: str
    args: tuple[Cond, ...]
