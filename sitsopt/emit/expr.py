"""Pointwise expressions as data: what a fused kernel computes for one element.

An expression is computed in f32 whatever its inputs are, and rounded where it is stored or where `cast` says
so. Equal subexpressions are one value: a generator asks `steps` for them in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

UNARY = (
    "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid",
    "silu", "relu", "gelu", "gelu_tanh", "erf", "floor", "not",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "lt", "le", "eq", "ne", "and", "or")
CASTS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Input:
    """The element of an input, by the input's name."""

    name: str


@dataclass(frozen=True)
class Scalar:
    """A float that is an argument of the kernel."""

    name: str


@dataclass(frozen=True)
class Const:
    """A number written into the text."""

    value: float


@dataclass(frozen=True)
class Apply:
    """An operation on other expressions. op: of UNARY or BINARY, `where`, or `cast:DTYPE`."""

    op: str
    args: tuple[Expr, ...]

    def __post_init__(self) -> None:
        """An unknown operation, or one with the wrong number of arguments, is an error here."""
        wanted = arity(self.op)
        if len(self.args) != wanted:
            raise ValueError(f"{self.op} takes {wanted} arguments, not {len(self.args)}")


Expr = Input | Scalar | Const | Apply


def arity(op: str) -> int:
    """How many arguments an operation takes. Raises ValueError on an unknown one."""
    if op in UNARY or (op.startswith("cast:") and op.removeprefix("cast:") in CASTS):
        return 1
    if op in BINARY:
        return 2
    if op == "where":
        return 3
    raise ValueError(f"no pointwise operation {op!r}")


def apply(op: str, *args: Expr | float) -> Apply:
    """`Apply` with plain numbers taken as constants."""
    return Apply(op, tuple(Const(float(a)) if isinstance(a, int | float) else a for a in args))


def steps(roots: Sequence[Expr]) -> list[Expr]:
    """Every distinct subexpression, arguments before what uses them."""
    seen: dict[Expr, None] = {}

    def visit(expr: Expr) -> None:
        if expr in seen:
            return
        for child in children(expr):
            visit(child)
        seen[expr] = None

    for root in roots:
        visit(root)
    return list(seen)


def children(expr: Expr) -> tuple[Expr, ...]:
    """What an expression is computed from."""
    return expr.args if isinstance(expr, Apply) else ()


def names(roots: Sequence[Expr], kind: type[Input] | type[Scalar]) -> Iterator[str]:
    """The names of the inputs, or of the scalars, in order of first use."""
    for expr in steps(roots):
        if isinstance(expr, kind):
            yield expr.name


@dataclass(frozen=True)
class Operand:
    """A tensor of a pointwise kernel.

    strides: for each dimension of the result `0` (broadcast), `1` (neighbours) or `?` (an argument);
    empty when the tensor lies exactly as the result does, without gaps.
    """

    name: str
    dtype: str
    strides: str = ""


@dataclass(frozen=True)
class Elementwise:
    """A fused pointwise kernel. wide: offsets need 64 bits."""

    name: str
    rank: int
    inputs: tuple[Operand, ...]
    outputs: tuple[tuple[Operand, Expr], ...]
    scalars: tuple[str, ...] = ()
    wide: bool = False

    family = "elementwise"

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Inputs, then outputs."""
        return (*self.inputs, *(operand for operand, _ in self.outputs))

    @property
    def dense(self) -> bool:
        """Every operand lies as the result does: one running index serves all of them."""
        return not any(operand.strides for operand in self.operands)
