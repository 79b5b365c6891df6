"""From a rule file of the right shape to a rule: every name bound, every condition shown by an example."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator
from typing import Any

from .dtypes import DTYPES
from .errors import SpecError
from .families import kernel_families
from .notation import RESERVED
from .problems import Problems
from .program import Arith, Program, Ref, Seq, Term
from .rule_examples import ExampleReader
from .rule_file import RuleFile, SpellingFile
from .rule_inputs import const_value
from .rule_model import Condition, Rule, Spelling, Tolerance
from .rule_scope import Scope
from .source import Document, PathIn


def check_rule(doc: Document, file: RuleFile, rule_id: str) -> Rule:
    """The rule in `doc`. Raises SpecError for one mistake and SpecErrors for several."""
    return _Checker(doc, file, rule_id).rule()


class _Checker:
    def __init__(self, doc: Document, file: RuleFile, rule_id: str) -> None:
        self.doc, self.file, self.id = doc, file, rule_id
        self.problems = Problems(doc)
        self.scope = Scope(self.problems, file.inputs)
        self.problems.finish()  # with a name missing, what follows would be noise

    def rule(self) -> Rule:
        file = self.file
        where = self.scope.conditions(file.where, ("where",))
        spellings = self._spellings()
        self._check_outcome()
        fold = self._fold()
        replace = self._replaced(spellings)
        self._check_names(spellings)
        reader = ExampleReader(self.problems, self.scope, spellings)
        examples = [reader.read(index, one) for index, one in enumerate(file.examples)]
        conditions = [*where, *(one for each in spellings for one in each.where)]
        reader.check_coverage(conditions, self._written_conditions())
        self.problems.finish()
        overrides = [file.overrides] if isinstance(file.overrides, str) else file.overrides
        return Rule(
            id=self.id, summary=file.summary.strip(), doc=file.doc.strip(), inputs=self.scope.inputs,
            spellings=tuple(spellings), where=tuple(where),
            through={name: frozenset(kinds) for name, kinds in file.through.items()},
            fold=fold, replace=replace, emit=file.emit,
            tolerance={name: Tolerance(one.rtol, one.atol) for name, one in file.tolerance.items()},
            grad=file.grad, after=tuple(file.after), overrides=tuple(overrides),
            replaces=file.replaces, examples=tuple(examples), pos=self.doc.at(()),
            text=self.doc.text, digest=hashlib.sha256(self.doc.text.encode()).hexdigest(),
        )  # fmt: skip

    # -- match --------------------------------------------------------------------------------------

    def _spellings(self) -> list[Spelling]:
        match = self.file.match
        written = match if isinstance(match, list) else [match]
        found: list[Spelling] = []
        for index, one in enumerate(written):
            path: PathIn = ("match", index) if isinstance(match, list) else ("match",)
            with self.problems.catch(*path):
                found.append(self._spelling(one, path))
                count, first = _outputs(found[-1].program), _outputs(found[0].program)
                if count != first:
                    self.problems.add(
                        path, f"this spelling returns {count}, the first one {first}",
                        "the same values in the same order from every spelling",
                    )  # fmt: skip
        return found

    def _spelling(self, one: str | SpellingFile, path: PathIn) -> Spelling:
        fixed: dict[str, Any] = {}
        where: list[Condition] = []
        if isinstance(one, str):
            program = self.scope.program(one, path)
        else:
            program = self.scope.program(one.code, (*path, "code"))
            fixed = self._fixed(one.with_, (*path, "with"))
            where = self.scope.conditions(one.where, (*path, "where"))
        for name in program.returns:
            if name in self.scope.inputs:
                raise SpecError(
                    program.pos,
                    f"the pattern returns its input `{name}`",
                    expected="results of ops",
                )
        return Spelling(program, fixed, tuple(where), self.doc.at(path))

    def _fixed(self, values: dict[str, Any], path: PathIn) -> dict[str, Any]:
        fixed: dict[str, Any] = {}
        for name, value in values.items():
            const = self.scope.consts.get(name)
            if const is None:
                consts = self.scope.consts
                self.problems.unknown((*path, name), "constant of `inputs`", name, consts, key=True)
                continue
            kind = const.const_type or ""
            try:
                fixed[name] = const_value(kind, value)
            except ValueError as error:
                self.problems.add((*path, name), f"`{name}` is a const {kind}", str(error))
        return fixed

    def _written_conditions(self) -> list[str]:
        match = self.file.match if isinstance(self.file.match, list) else []
        maps = [self.file.where, *(one.where for one in match if isinstance(one, SpellingFile))]
        return [text.strip() for where in maps for text in where]

    # -- fold and replace ---------------------------------------------------------------------------

    def _check_outcome(self) -> None:
        replaced = self.file.replace is not None or any(map(_own, self.file.match))
        emit = self.file.emit
        if emit is not None and emit not in kernel_families():
            self.problems.unknown(
                ("emit",), "family of kernels", emit, kernel_families(), key=False
            )
        if not replaced and emit is None:
            self.problems.add((), "the rule changes nothing", "`replace:`, or `emit:`, or both")
        if not replaced and self.file.fold:
            self.problems.add(("fold",), "`fold` without `replace`: nothing reads it", key=True)
        elif self.file.fold and not [*self._written_folds()]:
            self.problems.add(("fold",), "`fold` names no value", "`name = cat([a, b], 0)`")

    def _fold(self) -> dict[str, Program]:
        folds: dict[str, Program] = {}
        for name, text, path, shift in self._written_folds():
            with self.problems.catch(*path):
                taken = {*self.scope.inputs, *self.scope.scalars, *self.scope.packs, *RESERVED}
                if name in taken or not name.isidentifier():
                    raise SpecError(
                        self.doc.at(path, key=isinstance(self.file.fold, dict)),
                        f"`{name}` cannot name a fold", expected="a new name",
                    )  # fmt: skip
                program = self.scope.program(text, path, folds, shift, outputs=1)
                if len(program.returns) != 1:
                    raise SpecError(
                        program.pos, f"`{name}` stands for {_outputs(program)}", expected="1 value"
                    )
                self._check_constant(program)
                folds[name] = program
        return folds

    def _written_folds(self) -> Iterator[tuple[str, str, PathIn, int]]:
        """Name, program, path, and how many columns of the program's first line are not the file's."""
        word = "return "
        if isinstance(self.file.fold, str):
            name, equals, expression = self.file.fold.partition("=")
            if not equals or not name.strip().isidentifier():
                return
            start = len(name) + 1 + len(expression) - len(expression.lstrip())
            yield name.strip(), word + expression.lstrip(), ("fold",), len(word) - start
            return
        for name, text in self.file.fold.items():
            whole = re.search(r"^return\b", text, re.MULTILINE)
            yield name, text if whole else word + text, ("fold", name), 0 if whole else len(word)

    def _check_constant(self, program: Program) -> None:
        """A fold is computed once per parameter: it may read nothing else."""
        for let in program.lets:
            for name in names_in(let.call.args, let.call.kwargs):
                one = self.scope.inputs.get(name)
                if one is not None and one.is_tensor and one.kind != "param":
                    raise SpecError(
                        let.call.pos, f"`{name}` changes from call to call and cannot be folded",
                        expected="parameters only", hint=f"declare it so: `{name}: Param[...]`",
                    )  # fmt: skip

    def _replaced(self, spellings: list[Spelling]) -> Program | None:
        """The rule's own `replace`. Spellings that have one of theirs get it."""
        match, used, program = self.file.match, set[str](), None
        own = [index for index, one in enumerate(match) if _own(one)]
        if self.file.replace is not None and spellings:
            program = self._replace(self.file.replace, ("replace",), spellings[0], used)
        if isinstance(match, list) and len(spellings) == len(match):
            for index, one in enumerate(match):
                if text := _own(one):
                    replace = self._replace(
                        text, ("match", index, "replace"), spellings[index], used
                    )
                    spellings[index] = dataclasses.replace(spellings[index], replace=replace)
                elif own and self.file.replace is None:
                    self.problems.add(("match", index), "nothing says what replaces this spelling",
                                      "`replace` here or for the whole rule")  # fmt: skip
        for name in [name for name, *_ in self._written_folds()]:
            if name not in used and (own or program is not None):
                path = ("fold",) if isinstance(self.file.fold, str) else ("fold", name)
                self.problems.add(path, f"`replace` does not read `{name}`", "every fold used")
        return program or next((one.replace for one in spellings if one.replace), None)

    def _replace(
        self, text: str, path: PathIn, spelling: Spelling, used: set[str]
    ) -> Program | None:
        pattern, program = spelling.program, None
        folds = [name for name, *_ in self._written_folds()]
        with self.problems.catch(*path):
            outputs = len(pattern.returns)
            program = self.scope.program(text, path, folds, outputs=outputs)
            if len(program.returns) != outputs:
                raise SpecError(
                    program.pos, f"`replace` returns {_outputs(program)}, `match` {_outputs(pattern)}",
                    expected="the values of `match`, in its order",
                )  # fmt: skip
            self._check_sizes(program)
            used.update(_used(program), program.returns)
        return program

    def _check_sizes(self, program: Program) -> None:
        """A size that only an optional input has is unknown where that input is absent."""
        sure = {
            name for one in self.scope.inputs.values() if not one.optional for name in one.sizes
        }
        for let in program.lets:
            for name in names_in(let.call.args, let.call.kwargs):
                if name in self.scope.sizes - sure:
                    raise SpecError(
                        let.call.pos, f"the size `{name}` is known only where an optional input is there",
                        expected="sizes of inputs that are always there",
                    )  # fmt: skip

    # -- names --------------------------------------------------------------------------------------

    def _check_names(self, spellings: list[Spelling]) -> None:
        for index, spelling in enumerate(spellings):
            used = _used(spelling.program)
            for name, one in self.scope.inputs.items():
                if name in used or name in spelling.fixed or one.optional:
                    continue
                which = f"spelling {index + 1} of `match`" if len(spellings) > 1 else "`match`"
                self.problems.add(
                    ("inputs", name), f"{which} does not use the input `{name}`", "every input matched",
                    "" if one.is_tensor else f"or give it a value: `with: {{{name}: ...}}`", key=True,
                )  # fmt: skip
        lets = [name for one in spellings for let in one.program.lets for name in let.names]
        values = [*self.scope.tensors, *(name for name in lets if name[0] not in "%_")]
        for name in self.file.through:
            if name not in values:
                self.problems.unknown(
                    ("through", name), "value of the pattern", name, values, key=True
                )
        for dtype in self.file.tolerance:
            if dtype not in DTYPES:
                self.problems.unknown(("tolerance", dtype), "dtype", dtype, DTYPES, key=True)


def names_in(args: tuple[Term, ...], kwargs: tuple[tuple[str, Term], ...] = ()) -> Iterator[str]:
    """The names that stand in the arguments of a call."""
    for term in (*args, *(term for _, term in kwargs)):
        if isinstance(term, Ref):
            yield term.name
        elif isinstance(term, Seq):
            yield from names_in(term.items)
        elif isinstance(term, Arith):
            yield from names_in(term.args)


def _own(spelling: str | SpellingFile) -> str:
    """The `replace` that a spelling has of its own."""
    return (spelling.replace or "") if isinstance(spelling, SpellingFile) else ""


def _used(program: Program) -> set[str]:
    return {name for let in program.lets for name in names_in(let.call.args, let.call.kwargs)}


def _outputs(program: Program) -> str:
    count = len(program.returns)
    return f"{count} value" + "s" * (count != 1)
