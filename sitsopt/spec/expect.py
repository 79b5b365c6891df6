"""`expect:` in a recipe: how often a rule must fire, over the model's own configuration.

    fuse/qkv: num_hidden_layers
    fuse/rope: ">= num_hidden_layers"
    fold/conv_bn: ">= 2 * sum(depths) + 1"
    fuse/swiglu: 30

Names are those of the model's config, or of its `text_config` for a model of more than text;
`vision_config.num_hidden_layers` names one inside another. The functions are `len`, `sum`, `min` and
`max`. The text is parsed, never run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Pos, SpecError, did_you_mean

MAX_LENGTH = 200

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "sum": sum, "min": min, "max": max}
_FORM = "a number, or an expression over the model's config such as `>= 2 * num_hidden_layers + 1`"


@dataclass(frozen=True)
class Expectation:
    """How often `rule` must fire. Made by `expectation`, which checks the text."""

    rule: str
    text: str
    compare: str
    tree: ast.expr
    pos: Pos
    column: int = 0  # where the expression starts in the text, after a comparison sign

    def holds(self, count: int, config: object) -> tuple[bool, str]:
        """Whether `count` sites satisfy it for a model's config (a map, or an object with attributes),
        and what was wanted, such as `>= 30 (num_hidden_layers)`.

        Raises SpecError, with the nearest name, for a name that the config does not have.
        """
        wanted = self._value(self.tree, config)
        sign = "" if self.compare == "==" else f"{self.compare} "
        plain = isinstance(self.tree, ast.Constant)
        meaning = "" if plain else f" ({self.text.removeprefix(self.compare).strip()})"
        return _COMPARE[self.compare](count, wanted), f"{sign}{wanted}{meaning}"

    def _value(self, tree: ast.expr, config: object) -> Any:
        try:
            value = _evaluate(tree, lambda node: self._look_up(node, config))
        except (TypeError, ArithmeticError, ValueError) as error:
            raise self._error(tree, f"`{self.text}` cannot be computed: {error}") from None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(tree, f"`{self.text}` is {value!r}", expected="a whole number")
        return value

    def _look_up(self, node: ast.expr, config: object) -> Any:
        if isinstance(node, ast.Attribute):
            config, name = self._look_up(node.value, config), node.attr
        else:
            assert isinstance(node, ast.Name)
            name = node.id
        for place in (config, _get(config, "text_config")):
            if name in _names(place):
                return _get(place, name)
        raise self._error(
            node,
            f"the model's config has no `{name}`",
            expected="a name in the config of the model",
            hint=did_you_mean(name, _names(config) + _names(_get(config, "text_config"))),
        )

    def _error(self, node: ast.expr, problem: str, expected: str = "", hint: str = "") -> SpecError:
        at = self.pos.shifted(0, self.column + node.col_offset)
        return SpecError(at, problem, expected=expected, hint=hint, path=f"expect.{self.rule}")


def expectation(rule: str, wanted: int | str, pos: Pos) -> Expectation:
    """What a recipe wrote for `rule`; `pos` is where its text starts. Raises SpecError for a mistake."""
    text = str(wanted)
    path = f"expect.{rule}"
    if len(text) > MAX_LENGTH:
        raise SpecError(pos, f"an expression longer than {MAX_LENGTH} characters", path=path)
    body = text.lstrip()
    compare = next((sign for sign in _COMPARE if body.startswith(sign)), "==")
    body = body.removeprefix(compare)
    column = len(text) - len(body.lstrip())
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = pos.shifted(0, column + (getattr(error, "offset", None) or 1) - 1)
        raise SpecError(at, f"`{text}` is no expression", expected=_FORM, path=path) from None
    for node in ast.walk(tree):
        if not _allowed(node):
            at = pos.shifted(0, column + getattr(node, "col_offset", 0))
            problem = f"`{ast.unparse(node)}` may not stand in `{text}`"
            raise SpecError(at, problem, expected=_FORM, path=path)
    return Expectation(rule, text, compare, tree, pos, column)


def _allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        return named and bool(node.args) and not node.keywords
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name | ast.Attribute) and not node.attr.startswith("_")
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub)
    if isinstance(node, ast.BinOp):
        return type(node.op) in _BINARY
    return isinstance(node, ast.Name | ast.Load | ast.USub | ast.operator)


def _evaluate(node: ast.expr, look_up: Callable[[ast.expr], Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, look_up)
        case ast.BinOp(left=left, op=op, right=right):
            values = _evaluate(left, look_up), _evaluate(right, look_up)
            if not all(type(value) is int for value in values):
                raise TypeError("arithmetic takes whole numbers")  # a list times 10**9 is no count
            return _BINARY[type(op)](*values)
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name](*(_evaluate(arg, look_up) for arg in args))
        case _:
            return look_up(node)


def _get(config: object, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _names(config: object) -> list[str]:
    if isinstance(config, Mapping):
        return [str(name) for name in config]
    # Some configs rename: GPT-2's `n_layer` answers to `num_hidden_layers` as well.
    own = [*getattr(config, "__dict__", {}), *(getattr(config, "attribute_map", None) or {})]
    return [name for name in own if not name.startswith("_")]
