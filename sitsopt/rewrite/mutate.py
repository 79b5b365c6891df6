"""Mutants of a rule: each condition dropped, each constant perturbed. Examples that notice none of it prove little.

A mutant is *caught* when an example of the original rule fails under it (mutation testing: DeMillo et al., 1978).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from ..spec.cond_tree import Cond, Const, In
from ..spec.program import Let, Lit, Program, Seq
from ..spec.rule import Condition, Rule
from .verify import verify


@dataclass(frozen=True)
class Survivor:
    """A mutant that every example let pass."""

    rule: str
    mutation: str


def survivors(rule: Rule) -> list[Survivor]:
    """The mutants of a rule that its examples do not catch; empty for a well-tested rule."""
    return [
        Survivor(rule.id, name)
        for name, mutant in mutants(rule)
        if not verify(rule, mutant, first=True)
    ]


def mutants(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Every mutant with the name of its mutation."""
    yield from _conditions(rule)
    for i, spelling in enumerate(rule.spellings):
        for name, program in _programs(spelling.program):
            changed = list(rule.spellings)
            changed[i] = replace(spelling, program=program)
            yield f"match {i + 1}: {name}", replace(rule, spellings=tuple(changed))
        for name, program in _programs(spelling.replace) if spelling.replace else ():
            changed = list(rule.spellings)
            changed[i] = replace(spelling, replace=program)
            yield f"replace {i + 1}: {name}", replace(rule, spellings=tuple(changed))
        for key, value in spelling.fixed.items():
            for other in perturbed(value):
                changed = list(rule.spellings)
                changed[i] = replace(spelling, fixed={**spelling.fixed, key: other})
                yield f"match {i + 1}: {key} = {other}", replace(rule, spellings=tuple(changed))
    if rule.replace is not None and not all(spelling.replace for spelling in rule.spellings):
        for name, program in _programs(rule.replace):
            yield f"replace: {name}", replace(rule, replace=program)
    for key, fold in rule.fold.items():
        for name, program in _programs(fold):
            yield f"fold {key}: {name}", replace(rule, fold={**rule.fold, key: program})


def _conditions(rule: Rule) -> Iterator[tuple[str, Rule]]:
    for where, put in _wheres(rule):
        for i, condition in enumerate(where):
            rest = (*where[:i], *where[i + 1 :])
            yield f"where: without {condition.text}", put(rest)
            for name, tree in _trees(condition.tree):
                changed: Condition = replace(condition, tree=tree)
                yield f"where {condition.text}: {name}", put((*where[:i], changed, *where[i + 1 :]))


def _wheres(
    rule: Rule,
) -> Iterator[tuple[tuple[Condition, ...], Callable[[tuple[Condition, ...]], Rule]]]:
    yield rule.where, lambda where: replace(rule, where=where)
    for i, spelling in enumerate(rule.spellings):

        def put(where: tuple[Condition, ...], i: int = i) -> Rule:
            changed = list(rule.spellings)
            changed[i] = replace(changed[i], where=where)
            return replace(rule, spellings=tuple(changed))

        yield spelling.where, put


def perturbed(value: Any) -> list[Any]:
    """Other values of a constant's kind, near enough to be a plausible slip."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 1.25] if value and math.isfinite(value) else [1.0]
    return []


def _programs(program: Program) -> Iterator[tuple[str, Program]]:
    for i, let in enumerate(program.lets):
        for name, changed in _lets(let):
            yield name, replace(program, lets=(*program.lets[:i], changed, *program.lets[i + 1 :]))


def _lets(let: Let) -> Iterator[tuple[str, Let]]:
    call = let.call
    for j, term in enumerate(call.args):
        for name, other in _terms(term):
            args = (*call.args[:j], other, *call.args[j + 1 :])
            yield f"{call.op} {name}", replace(let, call=replace(call, args=args))
    for j, (key, term) in enumerate(call.kwargs):
        for name, other in _terms(term):
            kwargs = (*call.kwargs[:j], (key, other), *call.kwargs[j + 1 :])
            yield f"{call.op} {key}: {name}", replace(let, call=replace(call, kwargs=kwargs))


def _terms(term: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(term, Lit):
        for other in perturbed(term.value):
            yield f"{term.value} -> {other}", Lit(other)
    parts = term.items if isinstance(term, Seq) else getattr(term, "args", ())
    field = "items" if isinstance(term, Seq) else "args"
    for i, part in enumerate(parts):
        for name, other in _terms(part):
            yield name, replace(term, **{field: (*parts[:i], other, *parts[i + 1 :])})


def _trees(tree: Cond) -> Iterator[tuple[str, Cond]]:
    """Each constant of a condition perturbed, each member of a set taken out."""
    if isinstance(tree, Const):
        for other in perturbed(tree.value):
            yield f"{tree.value} -> {other}", replace(tree, value=other)
    if isinstance(tree, In) and len(tree.members) > 1:
        for i, member in enumerate(tree.members):
            yield (
                f"without {member.text}",
                replace(tree, members=(*tree.members[:i], *tree.members[i + 1 :])),
            )
    for one in fields(tree):
        value = getattr(tree, one.name)
        if isinstance(value, Cond):
            for name, part in _trees(value):
                yield name, _with(tree, one.name, part)
        elif (
            isinstance(value, tuple)
            and value
            and is_dataclass(value[0])
            and not isinstance(tree, In)
        ):
            for i, member in enumerate(value):
                if isinstance(member, Cond):
                    for name, part in _trees(member):
                        yield name, _with(tree, one.name, (*value[:i], part, *value[i + 1 :]))


def _with(tree: Cond, field: str, value: Any) -> Cond:
    changes: dict[str, Any] = {field: value}
    return replace(tree, **changes)
