"""Random programs through the backend, and proof that they find faults."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from sitsopt.rewrite import check as checking
from sitsopt.rewrite import edit as editing
from sitsopt.rewrite.edit import Edit
from sitsopt.spec.program import Call, Program
from sitsopt.spec.rule import Rule
from tests.cases.harness import shipped
from tests.fuzz.compare import Tally, differs, fuzz, merged
from tests.fuzz.programs import program

CHUNK = 50
PART = 250


def right(tally: Tally) -> None:
    assert not tally.wrong, "\n".join(tally.wrong)


@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_without_a_compiler(first: int) -> None:
    tally = fuzz(range(first, first + CHUNK), shipped())
    right(tally)
    assert tally.rewritten > tally.programs / 2


@pytest.mark.parametrize("first", [0, 1])
def test_through_inductor(first: int) -> None:
    """One seed in fifty: Inductor takes its time."""
    right(fuzz(range(20_000 + first * 25, 20_200, 50), shipped(), "inductor"))


def test_without_rules() -> None:
    """Capture alone changes nothing, bit by bit."""
    wrong = {n: differs(program(n, shipped()), [])[0] for n in range(30_000, 30_030)}
    assert not any(wrong.values()), wrong


def part(first: int) -> Tally:
    return fuzz(range(first, first + PART), shipped())


@pytest.mark.slow
def test_five_thousand_programs() -> None:
    """Every rule fires at least twenty times, and half of the programs have a rewrite.

    A fresh process for each part: torch keeps something of every capture, and ever more slows the next one down.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        tally = merged(pool.map(part, range(0, 5_000, PART)))
    print(tally.table(shipped()))
    right(tally)
    assert tally.programs == 5_000
    assert tally.rewritten > tally.programs / 2
    rules = [r.id for r in shipped() if r.stage != "weights"]  # those wait for a recipe
    rules.remove("attention/int4_kv")  # needs a cache among its arguments
    rare = {rule: tally.fired[rule] for rule in rules if tally.fired[rule] < 20}
    assert not rare, rare


# -- planted faults: each must show ---------------------------------------------------------------------


def seeds_of(rule_id: str, count: int = 40) -> Iterator[int]:
    """Seeds whose programs hold the pattern of a rule."""
    index = next(i for i, r in enumerate(shipped()) if r.id == rule_id)
    return iter(range(index, index + count * len(shipped()), len(shipped())))


def changed(rule_id: str, program: Program) -> list[Rule]:
    return [replace(r, replace=program) if r.id == rule_id else r for r in shipped()]


def swapped(rule: Rule) -> Program:
    (let,) = rule.replace.lets
    call = let.call
    mixed = Call(call.op, (call.args[1], call.args[0], *call.args[2:]), call.kwargs, call.pos)
    return replace(rule.replace, lets=(replace(let, call=mixed),))


@pytest.mark.parametrize("rule_id", ["fuse/swiglu", "fuse/geglu"])
def test_swapped_operands_are_found(rule_id: str) -> None:
    (rule,) = [r for r in shipped() if r.id == rule_id]
    assert fuzz(seeds_of(rule_id), changed(rule_id, swapped(rule)), enough=1).wrong


def test_a_lost_alias_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editing, "_alias_differs", lambda *args: False)
    assert fuzz(seeds_of("clean/clone"), shipped(), enough=1).wrong


def test_a_lost_check_of_readers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a value that is gone gets the result instead."""
    move: Any = editing.move

    def greedy(match: Any, view: Any, edit: Edit, news: list[Any]) -> None:
        move(match, view, edit, news)
        for node in edit.died:
            for reader in [u for u in node.users if u not in view.dead and u not in edit.made]:
                reader.replace_input_with(node, news[0])

    monkeypatch.setattr(checking, "_uses", lambda *args: None)
    monkeypatch.setattr(editing, "move", greedy)
    assert fuzz(seeds_of("fuse/swiglu"), shipped(), enough=1).wrong


@pytest.mark.slow
def test_a_lost_condition_is_found() -> None:
    """A literal that is a wildcard: any scale is taken for the pattern's."""
    (rule,) = [r for r in shipped() if r.id == "clean/mul_one"]
    from sitsopt.spec.program import Lit

    loose = []
    for spelling in rule.spellings:
        lets = [
            replace(
                let,
                call=replace(
                    let.call,
                    args=tuple(Lit(2) if isinstance(a, Lit) else a for a in let.call.args),
                ),
            )
            for let in spelling.program.lets
        ]
        loose.append(replace(spelling, program=replace(spelling.program, lets=tuple(lets))))
    wrong = [replace(r, spellings=tuple(loose)) if r is rule else r for r in shipped()]
    assert fuzz(range(400), wrong, enough=1).wrong
