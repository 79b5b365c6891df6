"""A rule, read and checked: what the matcher, the rewriter and `verify` work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .cond_tree import Cond
from .errors import Pos
from .program import Program
from .rule_inputs import Input

BUILT_IN_REASONS = ("pattern", "shape", "dtype", "uses", "mutation", "alias", "grad", "order")


@dataclass(frozen=True)
class Condition:
    """A condition as written, its tree, and the reason for it."""

    text: str
    reason: str
    tree: Cond
    pos: Pos = field(compare=False)


@dataclass(frozen=True)
class Spelling:
    """One way to write the pattern. `fixed`: constants of `inputs` that this spelling gives a value; `replace`: what
    stands there afterwards, the rule's own `replace` unless the spelling has one."""

    program: Program
    fixed: dict[str, Any]
    where: tuple[Condition, ...]
    pos: Pos = field(compare=False)
    replace: Program | None = None

    @property
    def code(self) -> str:
        return self.program.text


@dataclass(frozen=True)
class Tolerance:
    """|error| <= atol + rtol * |value|, against the reference in f64."""

    rtol: float
    atol: float


@dataclass(frozen=True)
class Example:
    """A case for `verify`: the rule fires, or skips for the reason `because`.

    binding: sizes as ints, packs as tuples, dtype variables as short names, constants by their type.
    given: a program to run instead of a spelling. spelling: index from 0, or None for every one that
    the binding fits. shapes and dtypes: what inputs are, where that is not what `inputs` declares.
    modules: where in the model inputs are read. target: facts of the target.
    """

    fires: bool
    binding: dict[str, Any]
    pos: Pos = field(compare=False)
    because: str | None = None
    given: Program | None = None
    absent: frozenset[str] = frozenset()
    values: dict[str, str] = field(default_factory=dict)
    layout: dict[str, str] = field(default_factory=dict)
    symbolic: frozenset[str] = frozenset()
    spelling: int | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    grad: bool = False
    modules: dict[str, str] = field(default_factory=dict)
    target: dict[str, bool | str] = field(default_factory=dict)

    def spellings(self, rule: Rule) -> list[int]:
        """The spellings whose fixed constants agree with the binding."""
        chosen = range(len(rule.spellings)) if self.spelling is None else [self.spelling]
        return [index for index in chosen if agrees(rule.spellings[index].fixed, self.binding)]


@dataclass(frozen=True, eq=False)
class Rule:
    """A rewrite rule. With `replace` the matched values are computed anew; with `emit` alone the matched
    nodes stay, claimed for one kernel. `digest` is the SHA-256 of the file's text."""

    id: str
    summary: str
    doc: str
    inputs: dict[str, Input]
    spellings: tuple[Spelling, ...]
    where: tuple[Condition, ...]
    through: dict[str, frozenset[str]]
    fold: dict[str, Program]
    replace: Program | None
    emit: str | None
    tolerance: dict[str, Tolerance]
    grad: str
    after: tuple[str, ...]
    overrides: tuple[str, ...]
    replaces: str | None
    examples: tuple[Example, ...]
    pos: Pos
    text: str = field(repr=False)
    digest: str

    @property
    def stage(self) -> str:
        """The first folder of the id."""
        return self.id.partition("/")[0]

    @property
    def conditions(self) -> dict[str, Condition]:
        """Every condition of the rule and of its spellings, by its text."""
        found = [*self.where, *(one for spelling in self.spellings for one in spelling.where)]
        return {condition.text: condition for condition in found}

    @property
    def outputs(self) -> int:
        """How many values the pattern returns."""
        return len(self.spellings[0].program.returns)

    @property
    def sizes(self) -> list[str]:
        """The size variables, packs left out."""
        return _distinct(name for one in self.inputs.values() for name in one.sizes)

    @property
    def packs(self) -> list[str]:
        return _distinct(name for one in self.inputs.values() for name in one.packs)

    @property
    def dtypes(self) -> list[str]:
        """The dtype variables."""
        return _distinct(one.dtype_var for one in self.inputs.values() if one.dtype_var)


def agrees(fixed: dict[str, Any], binding: dict[str, Any]) -> bool:
    """Whether no constant is bound to another value than the fixed one."""
    return all(name not in binding or binding[name] == value for name, value in fixed.items())


def _distinct(names: Any) -> list[str]:
    return list(dict.fromkeys(names))
