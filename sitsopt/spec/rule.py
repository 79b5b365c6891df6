"""Rules: read from files, checked alone and against each other.

    rule = load_rule(path, "fuse/swiglu")
    rules = load_rules([tmp / "rules", shipped])

A rule's id is its path below the folder of rules, its stage the first folder of that. Of the folders given
to `load_rules`, the first wins, but never silently: a file that stands in for a rule of a later folder says
`replaces:` with its own id, and two files with one id are otherwise an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from .errors import Pos, SpecError, did_you_mean, raise_all
from .rule_check import check_rule
from .rule_file import RuleFile
from .rule_inputs import Dim, Input
from .rule_model import BUILT_IN_REASONS, Condition, Example, Rule, Spelling, Tolerance
from .source import build, read

__all__ = [
    "BUILT_IN_REASONS", "Condition", "Dim", "Example", "Input", "Rule", "Spelling", "Tolerance",
    "load_rule", "load_rules", "rule_files",
]  # fmt: skip

# Files of these folders say what may be captured as one piece; they are no rewrite rules.
OTHER_FOLDERS = frozenset({"regions"})


def load_rule(path: str | Path, rule_id: str, text: str | None = None) -> Rule:
    """The rule in a file, or in `text`. Raises SpecError for one mistake and SpecErrors for several."""
    doc = read(path, text)
    return check_rule(doc, build(RuleFile, doc), rule_id)


def load_rules(dirs: Sequence[str | Path]) -> list[Rule]:
    """Every rule of the folders, by id. Raises all mistakes of all files at once."""
    errors: list[SpecError] = []
    rules: dict[str, Rule] = {}
    for rule_id, paths in rule_files(dirs, errors).items():
        loaded = []
        for path in paths:
            try:
                loaded.append(load_rule(path, rule_id))
            except SpecError as error:
                errors.append(error)
        errors += _clashes(rule_id, loaded)
        if loaded:
            rules[rule_id] = loaded[0]
    if not errors:
        errors += [error for rule in rules.values() for error in _references(rule, rules)]
        errors += _cycles(rules)
    raise_all(errors)
    return [rules[rule_id] for rule_id in sorted(rules)]


def rule_files(
    dirs: Sequence[str | Path], errors: list[SpecError] | None = None
) -> dict[str, list[Path]]:
    """Rule ids to their files, the one that wins first. Files that are none go to `errors`."""
    found: dict[str, list[Path]] = {}
    problems = [] if errors is None else errors
    for folder in map(Path, dirs):
        for path in sorted(folder.rglob("*.y*ml")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] in OTHER_FOLDERS or any(part.startswith(".") for part in parts):
                continue
            if path.suffix != ".yaml":
                problems.append(SpecError(
                    Pos(str(path)), f"a rule file ends in `{path.suffix}`", expected="`.yaml`",
                ))  # fmt: skip
            elif len(parts) == 1:
                problems.append(SpecError(
                    Pos(str(path)), "a rule outside the folder of a stage",
                    expected=f"`STAGE/{path.name}`, such as `fuse/{path.name}`",
                ))  # fmt: skip
            else:
                found.setdefault("/".join(parts), []).append(path)
    return found


def _clashes(rule_id: str, loaded: list[Rule]) -> list[SpecError]:
    errors: list[SpecError] = []
    for rule, other in pairwise(loaded):
        if rule.replaces is None:
            errors.append(SpecError(
                rule.pos, f"two rules are called `{rule_id}`: the other is {other.pos}",
                expected="one file for each id",
                hint=f"to use this one instead of the other, add `replaces: {rule_id}`",
            ))  # fmt: skip
    for index, rule in enumerate(loaded):
        if rule.replaces is None:
            continue
        if rule.replaces != rule_id:
            errors.append(_at(rule, "replaces", f"this rule is `{rule_id}` and cannot replace another id",
                              f"`replaces: {rule_id}`"))  # fmt: skip
        elif index == len(loaded) - 1:
            errors.append(_at(rule, "replaces", f"there is no other rule `{rule_id}` to replace",
                              "no `replaces`"))  # fmt: skip
    return errors


def _references(rule: Rule, rules: dict[str, Rule]) -> list[SpecError]:
    errors: list[SpecError] = []
    for key in ("after", "overrides"):
        for index, name in enumerate(getattr(rule, key)):
            if name == rule.id:
                errors.append(
                    _at(rule, key, f"a rule cannot name itself in `{key}`", "another rule", index)
                )
            elif name not in rules:
                hint = did_you_mean(name, rules)
                errors.append(
                    _at(rule, key, f"there is no rule `{name}`", "the id of a rule", index, hint)
                )
    return errors


def _cycles(rules: dict[str, Rule]) -> list[SpecError]:
    """One error for each circle of `after`, told at its first rule."""
    errors: list[SpecError] = []
    done: set[str] = set()
    for start in sorted(rules):
        trail: list[str] = []
        stack = [(start, iter(rules[start].after))] if start not in done else []
        while stack:
            name, following = stack[-1]
            trail[len(stack) - 1 :] = [name]
            step = next((one for one in following if one in rules and one not in done), None)
            if step is None:
                done.add(name)
                stack.pop()
            elif step in trail:
                circle = [*trail[trail.index(step) :], step]
                rule = rules[step]
                errors.append(_at(rule, "after", f"`after` goes in a circle: {' > '.join(circle)}",
                                  "an order", rule.after.index(circle[1])))  # fmt: skip
                done.add(name)
                stack.pop()
            else:
                stack.append((step, iter(rules[step].after)))
    return errors


def _at(
    rule: Rule, key: str, problem: str, expected: str, index: int | None = None, hint: str = ""
) -> SpecError:
    """An error at a key of a rule; its file is read again, for the place."""
    doc = read(rule.pos.file, rule.text)
    path: tuple[str | int, ...] = (key,) if index is None else (key, index)
    shown = key if index is None or isinstance(doc.data.get(key), str) else f"{key}[{index}]"
    return SpecError(doc.at(path), problem, expected=expected, hint=hint, path=shown)
