"""What a pydantic model allows at a path: its keys, its choices, and where else a key is at home."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, RootModel
from pydantic.fields import FieldInfo

Path = tuple[str | int, ...]


def key_of(name: str, info: FieldInfo) -> str:
    """A field's key in the file: its alias (`for`, a word Python keeps for itself) or its name."""
    alias = info.validation_alias if isinstance(info.validation_alias, str) else info.alias
    return alias or name


def fields_at(model: type[BaseModel], path: Path) -> list[str]:
    """The keys that the models at `path` have."""
    models = [kind for kind in _kinds(model, path) if _is_model(kind)]
    keys = [key_of(name, info) for one in models for name, info in one.model_fields.items()]
    return list(dict.fromkeys(keys))


def choices_at(model: type[BaseModel], path: Path) -> list[str]:
    """The fixed values allowed at `path`: those of `Literal`s and of enums."""
    choices: list[str] = []
    for kind in _kinds(model, path):
        if get_origin(kind) is Literal:
            choices += [_text(value) for value in get_args(kind)]
        elif isinstance(kind, type) and issubclass(kind, enum.Enum):
            choices += [_text(member.value) for member in kind]
    return list(dict.fromkeys(choices))


def homes_of(model: type[BaseModel], key: str) -> list[str]:
    """The places of the file in which `key` is known: `` for the top, `weights[]` for list items."""
    return [home for home, one in _homes(model, "", ()) if key in
            [key_of(name, info) for name, info in one.model_fields.items()]]  # fmt: skip


def models_in(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The model and every model reachable from its fields."""
    return list(dict.fromkeys(one for _, one in _homes(model, "", ())))


def _homes(kind: Any, home: str, seen: tuple[Any, ...]) -> Iterator[tuple[str, type[BaseModel]]]:
    for one in _alternatives(kind):
        if _is_model(one) and one not in seen:
            one.model_rebuild(raise_errors=False)  # names of models that were defined later
            if not issubclass(one, RootModel):
                yield home, one
            for name, info in one.model_fields.items():
                inner = home if issubclass(one, RootModel) else f"{home}.{key_of(name, info)}"
                yield from _homes(info.annotation, inner.lstrip("."), (*seen, one))
        elif (origin := get_origin(one)) in (list, tuple, set, frozenset):
            for item in get_args(one):
                yield from _homes(item, f"{home}[]", seen)
        elif isinstance(origin, type) and issubclass(origin, dict):
            yield from _homes(get_args(one)[1], f"{home}.*", seen)


def _kinds(kind: Any, path: Path) -> list[Any]:
    """The types that may stand at `path` below a value of type `kind`."""
    found: list[Any] = []
    for one in _alternatives(kind):
        if _is_model(one) and issubclass(one, RootModel):
            found += _kinds(one.model_fields["root"].annotation, path)
        elif not path:
            found.append(one)
        else:
            found += [deep for below in _below(one, path[0]) for deep in _kinds(below, path[1:])]
    return found


def _below(kind: Any, part: str | int) -> list[Any]:
    if _is_model(kind):
        return [
            info.annotation
            for name, info in kind.model_fields.items()
            if key_of(name, info) == part
        ]
    args = [arg for arg in get_args(kind) if arg is not Ellipsis]
    origin = get_origin(kind)
    if isinstance(origin, type) and issubclass(origin, dict):
        return args[1:]
    return args if origin in (list, tuple, set, frozenset) else []


def _alternatives(kind: Any) -> list[Any]:
    origin = get_origin(kind)
    if origin is Annotated:
        return _alternatives(get_args(kind)[0])
    if origin is Union or origin is types.UnionType:
        return [one for arg in get_args(kind) for one in _alternatives(arg)]
    return [kind]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _text(value: object) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )
