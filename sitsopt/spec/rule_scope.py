"""The names of a rule: its inputs, the sizes, packs and dtypes in their types, and what may stand where."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .cond_parse import parse_condition
from .cond_tree import FUNCTIONS, TENSOR, Cond, Fn, Name
from .dtypes import DTYPES
from .errors import SpecError, did_you_mean
from .notation import parse_program
from .problems import Problems
from .program import Program
from .rule_inputs import Input, parse_input
from .rule_model import Condition
from .source import PathIn


class Scope:
    """What `inputs` declares, and programs and conditions read against it."""

    def __init__(self, problems: Problems, inputs: dict[str, str]) -> None:
        self.problems = problems
        self.inputs: dict[str, Input] = {}
        for name, text in inputs.items():
            path = ("inputs", name)
            with problems.catch(*path):
                pos = problems.doc.at(path, key=True)
                self.inputs[name] = parse_input(name, text, problems.inside(path), pos)
        every = self.inputs.values()
        self.sizes = {name for one in every for name in one.sizes}
        self.packs = {name for one in every for name in one.packs}
        self.dtypes = {one.dtype_var for one in every if one.dtype_var}
        self.tensors = [one.name for one in every if one.is_tensor]
        self.consts = {one.name: one for one in every if not one.is_tensor}
        self.scalars = self.sizes | self.dtypes | set(self.consts)
        self._check_one_meaning()

    def program(
        self, text: str, path: PathIn, values: Collection[str] = (), shift: int = 0, **options: Any
    ) -> Program:
        """The program in the text at `path`; it may read the inputs and `values`."""
        pos_of = self.problems.inside(path, shift=shift)
        names = [*self.tensors, *values]
        return parse_program(text, pos_of, names, self.scalars, packs=self.packs, **options)

    def conditions(self, where: dict[str, str], path: PathIn) -> list[Condition]:
        """The conditions of a `where`; a mistake in one is kept and the others are read."""
        found: list[Condition] = []
        for text, reason in where.items():
            at = (*path, text)
            with self.problems.catch(*at):
                tree = parse_condition(text, self.problems.inside(at, key=True))
                self._check(tree)
                pos = self.problems.doc.at(at, key=True)
                found.append(Condition(text.strip(), reason.strip(), tree, pos))
        return found

    def _check_one_meaning(self) -> None:
        kinds = {"an input": set(self.inputs), "a size": self.sizes, "a pack of sizes": self.packs,
                 "a dtype": self.dtypes}  # fmt: skip
        told: set[str] = set()
        for one in self.inputs.values():
            for name in [*one.sizes, *one.packs, one.dtype_var or ""]:
                means = [kind for kind, names in kinds.items() if name in names]
                if len(means) > 1 and name not in told:
                    told.add(name)
                    problem = f"`{name}` is {' and '.join(means)}"
                    self.problems.add(("inputs", one.name), problem, "a name of its own for each")

    def _check(self, tree: Cond) -> None:
        """Raise at the first name of a condition that is not declared or stands in the wrong place."""
        if isinstance(tree, Fn):
            kinds = FUNCTIONS[tree.fn][0]
            for index, arg in enumerate(tree.args):
                wants_tensor = index < len(kinds) and kinds[index] == TENSOR
                if wants_tensor and isinstance(arg, Name):
                    self._check_input(arg, self.inputs if tree.fn == "present" else self.tensors)
                else:
                    self._check(arg)
        elif isinstance(tree, Name):
            self._check_name(tree)
        else:
            for part in tree.parts():
                self._check(part)

    def _check_input(self, tree: Name, allowed: Collection[str]) -> None:
        if tree.name not in allowed:
            raise SpecError(
                tree.pos, f"`{tree.name}` is no tensor of `inputs`",
                expected="one of " + ", ".join(allowed), hint=did_you_mean(tree.name, allowed),
            )  # fmt: skip

    def _check_name(self, tree: Name) -> None:
        name = tree.name
        if name in self.tensors:
            raise SpecError(
                tree.pos, f"`{name}` is a tensor: a condition compares a fact of it",
                expected=f"`rank({name})`, `size({name}, 0)`, `dtype({name})`, ...",
            )  # fmt: skip
        if name in self.packs:
            raise SpecError(tree.pos, f"`{name}` is several sizes", expected="a single size")
        if name not in self.scalars and not name.startswith("target."):
            known = sorted(self.scalars)
            raise SpecError(
                tree.pos, f"`{name}` is not declared",
                expected="one of " + ", ".join(known) if known else "a size, a dtype or a constant",
                hint=did_you_mean(name, [*known, *self.tensors, *DTYPES]),
            )  # fmt: skip
