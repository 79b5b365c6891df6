"""The text of a condition as a tree: a whitelist of Python's expressions, everything else refused."""

from __future__ import annotations

import ast

from .cond_tree import (
    BOOLEAN,
    FUNCTIONS,
    TENSOR,
    VARIADIC,
    Compare,
    Cond,
    Const,
    Fn,
    In,
    Logic,
    Name,
    Op,
)
from .dtypes import DTYPES
from .errors import Pos, did_you_mean
from .pytext import PosOf, PyText
from .terms import BINARY, CONSTANTS

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_EXPECTED = "a comparison, `x in {...}`, a function of an input, and, or, not"


def parse_condition(text: str, pos: Pos | PosOf) -> Cond:
    """The condition in `text`, which starts at `pos`. Raises SpecError at the first mistake."""
    pos_of = pos.shifted if isinstance(pos, Pos) else pos
    source = PyText(text.strip(), pos_of, "eval")
    assert isinstance(source.tree, ast.Expression)
    return _Parser(source).truth(source.tree.body)


class _Parser:
    def __init__(self, text: PyText) -> None:
        self.text = text

    def truth(self, node: ast.expr) -> Cond:
        """An expression that is true or false."""
        tree = self._node(node)
        if isinstance(tree, Op) or (isinstance(tree, Fn) and tree.fn not in BOOLEAN):
            self.text.refuse(node, f"`{tree.text}` is neither true nor false", "a comparison")
        if isinstance(tree, Const) and not isinstance(tree.value, bool):
            self.text.refuse(node, f"`{tree.text}` is neither true nor false", "a comparison")
        return tree

    def _node(self, node: ast.expr) -> Cond:
        match node:
            case ast.BoolOp(op=op, values=values):
                word = "and" if isinstance(op, ast.And) else "or"
                return self._made(node, Logic, word, tuple(self.truth(value) for value in values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._made(node, Logic, "not", (self.truth(operand),))
            case ast.Compare():
                return self._comparison(node)
            case _:
                return self._value(node)

    def _value(self, node: ast.expr) -> Cond:
        """An expression that is a number, a text, a dtype or an input."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return self._made(node, Const, value)
            case ast.Name(id=name):
                return self._name(node, name)
            case ast.Attribute(value=ast.Name(id="target"), attr=fact):
                return self._made(node, Name, f"target.{fact}")
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._value(operand)
                if isinstance(inner, Const) and type(inner.value) in (int, float):
                    return self._made(node, Const, -inner.value)  # type: ignore[operator]
                return self._made(node, Op, "neg", (inner,))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                args = (self._value(left), self._value(right))
                return self._made(node, Op, BINARY[type(op)], args)
            case ast.Call():
                return self._call(node)
            case _:
                self.text.refuse(node, f"`{self.text.source(node)}` is not allowed here", _EXPECTED)

    def _name(self, node: ast.Name, name: str) -> Cond:
        if name in DTYPES:
            return self._made(node, Const, name)
        if name in CONSTANTS:
            return self._made(node, Const, CONSTANTS[name])
        if name == "target":
            self.text.refuse(node, "`target` stands alone", "one of its facts: `target.arch`")
        return self._made(node, Name, name)

    def _comparison(self, node: ast.Compare) -> Cond:
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn):
            return self._membership(node, isinstance(node.ops[0], ast.NotIn))
        ops = []
        for op, operand in zip(node.ops, node.comparators, strict=True):
            if type(op) not in _COMPARISONS:
                self.text.refuse(operand, "this comparison is not allowed", "< <= > >= == != or in")
            ops.append(_COMPARISONS[type(op)])
        operands = tuple(self._value(one) for one in (node.left, *node.comparators))
        return self._made(node, Compare, tuple(ops), operands)

    def _membership(self, node: ast.Compare, negated: bool) -> Cond:
        members = node.comparators[0]
        if not isinstance(members, ast.Set):
            self.text.refuse(
                members,
                f"`{self.text.source(members)}` is no set",
                "values in braces: `T in {f16, bf16}`",
            )
        items = tuple(self._value(member) for member in members.elts)
        return self._made(node, In, self._value(node.left), items, negated)

    def _call(self, node: ast.Call) -> Cond:
        name = node.func.id if isinstance(node.func, ast.Name) else self.text.source(node.func)
        if name not in FUNCTIONS:
            self.text.refuse(
                node, f"there is no function `{name}`", "one of " + ", ".join(FUNCTIONS),
                did_you_mean(name, FUNCTIONS),
            )  # fmt: skip
        kinds = FUNCTIONS[name][0]
        count = len(node.args)
        if node.keywords or count < len(kinds) or (count > len(kinds) and name not in VARIADIC):
            shown = ", ".join(f"a {kind}" for kind in kinds)
            self.text.refuse(node, f"`{name}` takes other arguments", f"{name}({shown})")
        for arg, kind in zip(node.args, kinds, strict=False):
            if kind == TENSOR and not isinstance(arg, ast.Name):
                self.text.refuse(
                    arg, f"`{self.text.source(arg)}` is no input", "the name of an input"
                )
        return self._made(node, Fn, name, tuple(self._value(arg) for arg in node.args))

    def _made(self, node: ast.expr, kind: type[Cond], *parts: object) -> Cond:
        return kind(*parts, text=self.text.source(node), pos=self.text.at(node))
