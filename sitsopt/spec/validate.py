"""Plain data against a pydantic model, told in the words of the person who wrote the data.

Every finding names a path in the data, what stands there, what may stand there and the nearest known
name. It is built from pydantic's typed errors and from the model's own fields, never from message text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, RootModel, ValidationError
from pydantic_core import ErrorDetails

from .errors import did_you_mean
from .fields import choices_at, fields_at, homes_of, models_in
from .yamltree import is_number

M = TypeVar("M", bound=BaseModel)
Path = tuple[str | int, ...]


class Spec(BaseModel):
    """The base of every model of a data file: unknown keys are errors, nothing is coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)


@dataclass(frozen=True)
class Finding:
    """One mistake. `on_key` says that the key at `path` is wrong, not its value."""

    path: Path
    problem: str
    expected: str = ""
    hint: str = ""
    on_key: bool = False


@dataclass(frozen=True)
class _Error:
    """A pydantic error whose location is split into the data's path and the union branches taken."""

    details: ErrorDetails
    path: Path
    branches: tuple[tuple[Path, str], ...]  # (where the union stands, which branch)


def validate(model: type[M], data: Any) -> tuple[M | None, list[Finding]]:
    """The model's instance and no finding, or None and at least one."""
    _check_forbids_extra(model)
    try:
        # JSON input in strict mode: no "1" for 1, yet a list may fill a tuple and text an enum.
        text = json.dumps(data, default=_refuse)
    except (TypeError, ValueError) as error:
        return None, [Finding((), f"this is not plain data: {error}")]
    try:
        return model.model_validate_json(text, strict=True), []
    except ValidationError as error:
        errors = [_locate(details, data) for details in error.errors(include_url=False)]
        return None, _findings(model, errors)


@cache
def _check_forbids_extra(model: type[BaseModel]) -> None:
    for one in models_in(model):
        if one.model_config.get("extra") != "forbid" and not issubclass(one, RootModel):
            raise TypeError(f'{one.__name__} must forbid unknown keys: extra="forbid"')


def _refuse(value: object) -> None:
    raise TypeError(f"a value of type {type(value).__name__}")


def _locate(details: ErrorDetails, data: Any) -> _Error:
    path: Path = ()
    branches: list[tuple[Path, str]] = []
    loc = details["loc"]
    for index, part in enumerate(loc):
        if isinstance(data, list) and isinstance(part, int) and 0 <= part < len(data):
            data, path = data[part], (*path, part)
        elif isinstance(data, dict) and (key := _key(data, part)) is not None:
            data, path = data[key], (*path, key)
        elif index == len(loc) - 1 and details["type"] == "missing":
            path = (*path, part)
        elif part != "[key]":
            branches.append((path, str(part)))
    return _Error(details, path, tuple(branches))


def _key(data: dict[Any, Any], part: str | int) -> Any:
    if part in data:
        return part
    return next((key for key in data if str(key) == str(part)), None)


def _findings(model: type[BaseModel], errors: list[_Error]) -> list[Finding]:
    findings: list[Finding] = []
    for group in _by_union(errors):
        branches: dict[str, list[_Error]] = {}
        for error in group:
            branches.setdefault(error.branches[0][1] if error.branches else "", []).append(error)
        if len(branches) == 1:
            inner = [_Error(e.details, e.path, e.branches[1:]) for e in group]
            if group[0].branches:
                findings += _findings(model, inner)
            else:
                findings += [_finding(model, error) for error in group]
        else:
            findings += _nearest_branch(model, branches)
    return _without_echoes(findings)


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    """Each finding once, and none that says a key is missing when it is there with a typo."""
    unknown = [one for one in findings if one.on_key]

    def echoes(one: Finding) -> bool:
        return bool(one.path) and not one.on_key and any(
            one.path[:-1] == other.path[:-1] and f"`{one.path[-1]}`" in other.hint for other in unknown
        )  # fmt: skip

    return [finding for finding in dict.fromkeys(findings) if not echoes(finding)]


def _by_union(errors: list[_Error]) -> Iterable[list[_Error]]:
    groups: dict[object, list[_Error]] = {}
    for index, error in enumerate(errors):
        key = ("union", error.branches[0][0]) if error.branches else ("alone", index)
        groups.setdefault(key, []).append(error)
    return groups.values()


def _nearest_branch(model: type[BaseModel], branches: dict[str, list[_Error]]) -> list[Finding]:
    """Of a union, the findings of the branch that fits best; all of them when none fits at all."""
    at = next(iter(branches.values()))[0].branches[0][0]
    fitting = [group for group in branches.values() if all(len(e.path) > len(at) for e in group)]
    if fitting:
        group = min(fitting, key=len)
        return _findings(model, [_Error(e.details, e.path, e.branches[1:]) for e in group])
    each = [
        _finding(model, error) for group in branches.values() for error in group if error.path == at
    ]
    expected = dict.fromkeys(finding.expected for finding in each if finding.expected)
    hints = [finding.hint for finding in each if finding.hint]
    return [Finding(at, each[0].problem, " or ".join(expected), hints[0] if hints else "")]


def _finding(model: type[BaseModel], error: _Error) -> Finding:
    kind, path, value = error.details["type"], error.path, error.details["input"]
    context: Mapping[str, Any] = error.details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(model, path)
    if kind == "missing":
        return Finding(path, f"the key `{path[-1]}` is missing", hint=f"add `{path[-1]}:`")
    if kind in ("value_error", "assertion_error"):
        return Finding(path, str(context.get("error", error.details["msg"])))
    if "[key]" in error.details["loc"]:
        return Finding(path, f"`{path[-1]}` is no key here", _expected(model, error), on_key=True)
    hint = ""
    if isinstance(value, str):
        hint = did_you_mean(value, choices_at(model, path))
    if kind.startswith("bool") and str(value).lower() in ("yes", "no", "on", "off"):
        hint = "in YAML 1.2 this is text: write true or false"
    if kind.startswith(("int", "float")) and isinstance(value, str) and is_number(value):
        hint = "without quotes it is a number"
    return Finding(path, f"{_name(path)} is {_show(value)}", _expected(model, error), hint)


def _unknown_key(model: type[BaseModel], path: Path) -> Finding:
    key, names = str(path[-1]), fields_at(model, path[:-1])
    hint = did_you_mean(key, names, ties=True)
    homes = [f"under `{home}`" if home else "at the top" for home in homes_of(model, key)]
    if not hint and homes and key not in names:
        hint = "this key belongs " + " or ".join(homes)
    return Finding(path, f"unknown key `{key}`", _one_of(names), hint, on_key=True)


_KINDS = {
    "string_type": "text",
    "int_type": "a whole number", "int_from_float": "a whole number", "int_parsing": "a whole number",
    "float_type": "a number", "float_parsing": "a number", "finite_number": "a finite number",
    "bool_type": "true or false", "bool_parsing": "true or false",
    "list_type": "a list", "tuple_type": "a list", "set_type": "a list", "frozen_set_type": "a list",
    "dict_type": "a map of keys", "model_type": "a map of keys", "model_attributes_type": "a map of keys",
    "none_required": "null",
    "greater_than": "a number above {gt:g}", "greater_than_equal": "{ge:g} or more",
    "less_than": "a number below {lt:g}", "less_than_equal": "{le:g} or less",
    "multiple_of": "a multiple of {multiple_of}",
    "string_pattern_mismatch": "text that matches `{pattern}`",
    "string_too_short": "text that is not empty", "string_too_long": "at most {max_length} characters",
    "too_short": "a list of at least {min_length}", "too_long": "a list of at most {max_length}",
}  # fmt: skip


def _expected(model: type[BaseModel], error: _Error) -> str:
    kind = error.details["type"]
    if kind in ("literal_error", "enum"):
        choices = choices_at(model, error.path)
        return (
            _one_of(choices) if choices else str(error.details.get("ctx", {}).get("expected", ""))
        )
    template = _KINDS.get(kind)
    return template.format(**error.details.get("ctx", {})) if template else error.details["msg"]


def _one_of(names: Iterable[str]) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else "one of " + ", ".join(names) if names else "no keys"


def _name(path: Path) -> str:
    if not path:
        return "the file"
    return f"item {path[-1] + 1}" if isinstance(path[-1], int) else f"`{path[-1]}`"


def _show(value: object) -> str:
    if value is None:
        return "empty"
    if value == "":
        return "empty text"
    if isinstance(value, str):
        return f"the text `{value if len(value) <= 40 else value[:40] + '...'}`"
    if isinstance(value, dict | list):
        return "a map" if isinstance(value, dict) else "a list"
    return str(value).lower() if isinstance(value, bool) else str(value)
