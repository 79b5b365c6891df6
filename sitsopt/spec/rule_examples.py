"""The examples of a rule: complete bindings, and a `skips` for every condition."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from .dtypes import DTYPES
from .errors import SpecError, nearest
from .problems import Problems
from .rule_file import ExampleFile
from .rule_inputs import const_value
from .rule_model import BUILT_IN_REASONS, Condition, Example, Spelling, agrees
from .rule_scope import Scope
from .source import PathIn


class ExampleReader:
    """Reads examples against the inputs and the spellings of their rule."""

    def __init__(self, problems: Problems, scope: Scope, spellings: list[Spelling]) -> None:
        self.problems, self.scope, self.spellings = problems, scope, spellings
        self.read_ones: list[tuple[Example, PathIn]] = []

    def read(self, index: int, file: ExampleFile) -> Example:
        """One example; its mistakes go to the problems of the rule."""
        path: PathIn = ("examples", index)
        fires = file.fires is not None
        place: PathIn = (*path, "fires" if fires else "skips")
        given = None
        if file.given is not None:
            with self.problems.catch(*path, "given"):
                given = self.scope.program(file.given, (*path, "given"), in_place=True)
        self._check_inputs(file, path)
        binding = self._binding((file.fires if fires else file.skips) or {}, place)
        spelling = self._spelling(file, path)
        example = Example(
            fires=fires, binding=binding, pos=self.problems.doc.at(path), because=file.because,
            given=given, absent=frozenset(file.absent), values=dict(file.values),
            layout=dict(file.layout), symbolic=frozenset(file.symbolic), spelling=spelling,
            shapes={name: tuple(shape) for name, shape in file.shapes.items()},
            dtypes=dict(file.dtypes), grad=file.grad, modules=dict(file.modules),
            target=dict(file.target),
        )  # fmt: skip
        self._check_complete(example, place, (file.fires if fires else file.skips) or {})
        self.read_ones.append((example, path))
        return example

    def check_coverage(self, conditions: Iterable[Condition], written: Collection[str]) -> None:
        """At least one example fires, each condition has a `skips`, each `because` names one of them.

        written: the texts of all conditions, those that could not be read too.
        """
        if not self.read_ones:
            self.problems.add(("examples",), "the rule has no example", "`- fires: {...}`")
            return
        if not any(example.fires for example, _ in self.read_ones):
            self.problems.add(("examples",), "no example fires", "`- fires: {...}`")
        reasons, meant = [*dict.fromkeys(written), *BUILT_IN_REASONS], set()
        for example, path in self.read_ones:
            if example.because is not None and example.because not in reasons:
                meant.add(nearest(example.because, reasons))
                at, name = (*path, "because"), example.because
                self.problems.unknown(at, "reason of this rule", name, reasons, key=False)
        shown = {example.because for example, _ in self.read_ones} | meant
        for text, condition in {one.text: one for one in conditions}.items():
            if text not in shown:
                self.problems.errors.append(SpecError(
                    condition.pos, f"no example shows what `{text}` is for",
                    expected="a `skips` with this condition as its `because`",
                    hint="every condition has an example that only this condition stops",
                ))  # fmt: skip

    def _spelling(self, file: ExampleFile, path: PathIn) -> int | None:
        if file.spelling is not None and file.spelling > len(self.spellings):
            count = len(self.spellings)
            self.problems.add(
                (*path, "spelling"), f"there is no spelling {file.spelling}", f"1 to {count}"
            )
            return None
        return file.spelling - 1 if file.spelling is not None else None

    def _check_inputs(self, file: ExampleFile, path: PathIn) -> None:
        scope = self.scope
        optional = [name for name, one in scope.inputs.items() if one.optional and one.is_tensor]
        for index, name in enumerate(file.absent):
            if name not in optional:
                at = (*path, "absent", index)
                self.problems.unknown(at, "optional input", name, optional, key=False)
        for index, name in enumerate(file.symbolic):
            if name not in scope.sizes | scope.packs:
                sizes = sorted(scope.sizes | scope.packs)
                self.problems.unknown((*path, "symbolic", index), "size", name, sizes, key=False)
        for key in ("values", "layout", "shapes", "dtypes", "modules"):
            for name in getattr(file, key):
                if name not in scope.tensors:
                    at = (*path, key, name)
                    self.problems.unknown(at, "tensor of `inputs`", name, scope.tensors, key=True)

    def _binding(self, written: dict[str, Any], path: PathIn) -> dict[str, Any]:
        scope, binding = self.scope, {}
        known = [*scope.sizes, *scope.packs, *scope.dtypes, *scope.consts]
        for name, value in written.items():
            at = (*path, name)
            if name not in known:
                self.problems.unknown(at, "size, dtype or constant", name, sorted(known), key=True)
                continue
            try:
                binding[name] = self._bound(name, value)
            except ValueError as error:
                self.problems.add(at, f"`{name}` cannot be {_show(value)}", str(error))
        return binding

    def _bound(self, name: str, value: Any) -> Any:
        scope = self.scope
        if name in scope.consts:
            const = scope.consts[name]
            return (
                None
                if value is None and const.optional
                else const_value(const.const_type or "", value)
            )
        if name in scope.dtypes:
            if value not in DTYPES:
                raise ValueError("one of " + ", ".join(DTYPES))
            return value
        if name in scope.packs:
            if not isinstance(value, list) or not all(_is_size(one) for one in value):
                raise ValueError("a list of sizes, such as [2, 16]")
            return tuple(value)
        if not _is_size(value):
            raise ValueError("a size, 0 or more")
        return value

    def _check_complete(self, example: Example, path: PathIn, written: dict[str, Any]) -> None:
        chosen = [
            one for index, one in enumerate(self.spellings)
            if example.spelling in (None, index) and agrees(one.fixed, example.binding)
        ]  # fmt: skip
        if self.spellings and not chosen:
            fixed = sorted({name for one in self.spellings for name in one.fixed})
            self.problems.add(path, f"no spelling fixes {', '.join(fixed)} to these values")
            return
        missing = [name for name in self._needed(example, chosen) if name not in written]
        if missing:
            shown = ", ".join(f"`{name}`" for name in missing)
            self.problems.add(path, f"the example gives no value for {shown}", "a value for every size, "
                              "dtype and constant")  # fmt: skip

    def _needed(self, example: Example, chosen: list[Spelling]) -> list[str]:
        needed: list[str] = []
        for name, one in self.scope.inputs.items():
            if name in example.absent:
                continue
            if one.is_tensor:
                # an input whose shape and dtype are given outright needs no variables
                shape = [] if name in example.shapes else [*one.sizes, *one.packs]
                dtype = [one.dtype_var] if one.dtype_var and name not in example.dtypes else []
                needed += shape + dtype
            elif not one.optional and not (chosen and all(name in each.fixed for each in chosen)):
                needed.append(name)
        return list(dict.fromkeys(needed))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _show(value: object) -> str:
    return f"the text `{value}`" if isinstance(value, str) else str(value)
