"""Python text that is parsed and never run: its syntax tree, with places in the file it came from."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from typing import Literal, NoReturn

from .errors import Pos, SpecError

MAX_CHARS = 20_000
MAX_DEPTH = 60

PosOf = Callable[[int, int], Pos]


class PyText:
    """One piece of Python text and its syntax tree. `pos_of` maps a line and a column of the text, both
    from 0, to a place in the file."""

    def __init__(self, text: str, pos_of: PosOf, mode: Literal["exec", "eval"]) -> None:
        self.text, self.pos_of = text, pos_of
        self._lines = [line.encode() for line in text.split("\n")]
        self.tree = self._parse(mode)
        if _depth(self.tree) > MAX_DEPTH:
            raise SpecError(pos_of(0, 0), f"nested more than {MAX_DEPTH} levels deep")

    def at(self, node: ast.AST) -> Pos:
        """Where a node of the tree stands in the file."""
        line = getattr(node, "lineno", 1) - 1
        before = self._lines[line][: getattr(node, "col_offset", 0)]  # ast counts bytes
        return self.pos_of(line, len(before.decode(errors="replace")))

    def source(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node, in one line."""
        shown = " ".join((ast.get_source_segment(self.text, node) or "").split())
        return shown if len(shown) <= 60 else shown[:57] + "..."

    def refuse(self, node: ast.AST, problem: str, expected: str = "", hint: str = "") -> NoReturn:
        """Raise a SpecError at a node."""
        raise SpecError(self.at(node), problem, expected=expected, hint=hint)

    def _parse(self, mode: Literal["exec", "eval"]) -> ast.AST:
        if len(self.text) > MAX_CHARS:
            raise SpecError(self.pos_of(0, 0), f"more than {MAX_CHARS} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # "\d" is a warning of the compiler, not for our reader
                return ast.parse(self.text, mode=mode)
        except SyntaxError as error:
            line = min(max((error.lineno or 1) - 1, 0), len(self._lines) - 1)
            column = min(max((error.offset or 1) - 1, 0), len(self._lines[line].decode()))
            why = "" if error.msg == "invalid syntax" else f": {error.msg}"
            raise SpecError(
                self.pos_of(line, column),
                f"not valid syntax{why}",
                expected="Python syntax",
            ) from None
        except (ValueError, RecursionError, MemoryError, OverflowError) as error:
            raise SpecError(
                self.pos_of(0, 0), f"this text cannot be parsed: {error or 'nested too deep'}"
            ) from None


def _depth(tree: ast.AST) -> int:
    """Counted without recursion: what is too deep must not overflow the stack of its own check."""
    depth, level = 0, [tree]
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return depth
