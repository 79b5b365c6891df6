"""Arguments: names, literals, lists, and arithmetic over sizes and constants."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

from .dtypes import DTYPES
from .program import Arith, DType, Lit, Seq, Term
from .pytext import PyText

CONSTANTS = {"inf": math.inf, "nan": math.nan}
BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
}  # fmt: skip
_EXPECTED = "a name, a literal, a list, a call, or arithmetic over sizes"


class TermReader:
    """Turns expressions into terms; what a name, a `*pack` and a nested call mean is given."""

    def __init__(
        self,
        text: PyText,
        name: Callable[[ast.Name, bool], Term],
        spread: Callable[[ast.Starred], Term],
        call: Callable[[ast.Call], Term],
    ) -> None:
        self.text, self._name, self._spread, self._call = text, name, spread, call

    def read(self, node: ast.expr, scalar: bool = False) -> Term:
        """The term; `scalar` when it stands in arithmetic, where tensors and lists may not."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return self._literal(node, value, scalar)
            case ast.Name(id=name) if name in DTYPES:
                return Lit(DType(name)) if not scalar else self._not_a_number(node)
            case ast.Name(id=name) if name in CONSTANTS:
                return Lit(CONSTANTS[name])
            case ast.Name():
                return self._name(node, scalar)
            case ast.List(elts=items) if not scalar:
                return Seq(tuple(self._item(item) for item in items))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                return self._signed(sign, operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                return Arith(BINARY[type(op)], (self.read(left, True), self.read(right, True)))
            case ast.Call(func=ast.Name(id="min" | "max")) if scalar or self._is_scalar_call(node):
                return self._extreme(node)
            case ast.Call() if not scalar:
                return self._call(node)
            case ast.Tuple():
                self.text.refuse(node, "a tuple", "a list, `[a, b]`")
            case ast.Subscript():
                self.text.refuse(
                    node, f"`{self.text.source(node)}` takes a part of a value", _EXPECTED,
                    "name the results of the op: `a, b = op(...)`",
                )  # fmt: skip
            case _:
                self.text.refuse(node, f"`{self.text.source(node)}` is not allowed here", _EXPECTED)

    def _item(self, node: ast.expr) -> Term:
        return self._spread(node) if isinstance(node, ast.Starred) else self.read(node)

    def _literal(
        self, node: ast.Constant, value: bool | int | float | str | None, scalar: bool
    ) -> Term:
        if isinstance(node.kind, str):
            self.text.refuse(node, "a prefix on text", "plain text in quotes")
        if scalar and (value is None or isinstance(value, bool | str)):
            self._not_a_number(node)
        return Lit(value)

    def _not_a_number(self, node: ast.expr) -> Term:
        self.text.refuse(node, f"`{self.text.source(node)}` is no number", "sizes and constants")

    def _signed(self, sign: ast.unaryop, operand: ast.expr) -> Term:
        term = self.read(operand, True)
        if isinstance(sign, ast.UAdd):
            return term
        if isinstance(term, Lit) and isinstance(term.value, int | float):
            return Lit(-term.value)
        return Arith("neg", (term,))

    def _is_scalar_call(self, node: ast.Call) -> bool:
        """`min` and `max` are arithmetic with two arguments or more that are no tensors: `aten.max(x)`
        must be written with its namespace."""
        return len(node.args) > 1

    def _extreme(self, node: ast.Call) -> Term:
        assert isinstance(node.func, ast.Name)
        if node.keywords or len(node.args) < 2:
            self.text.refuse(
                node, f"`{self.text.source(node)}`", f"`{node.func.id}(a, b)` of sizes"
            )
        return Arith(node.func.id, tuple(self.read(arg, True) for arg in node.args))
