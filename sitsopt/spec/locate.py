"""Where data files are: the shipped ones, and the folders that a user adds to them.

A folder on the search path holds `rules/`, `recipes/` or `backends/`, as the project itself does. It is
named by the backend option `path`, by the environment variable SITSOPT_PATH, or by `[tool.sitsopt] path`
in the pyproject.toml above the running script. The working directory never adds anything: starting a
program in a folder of strangers' files must not change what it does.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import Pos, SpecError, did_you_mean

Kind = Literal["rules", "recipes", "backends"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VARIABLE = "SITSOPT_PATH"

_PACKAGE = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")  # no way out of the folder
_SINGULAR = {"rules": "rule", "recipes": "recipe", "backends": "target"}


def dirs(kind: Kind, extra: Sequence[str | Path] = ()) -> list[Path]:
    """The folders that hold files of a kind, the ones that win first: `extra` (the option),
    SITSOPT_PATH, the project of the running script, and last what is shipped."""
    found = [root / kind for root in search_path(extra) if (root / kind).is_dir()]
    return list(dict.fromkeys([*found, shipped(kind)]))


def rule_dirs(extra: Sequence[str | Path] = ()) -> list[Path]:
    """The folders that hold rules; see `dirs`."""
    return dirs("rules", extra)


def shipped(kind: Kind) -> Path:
    """The project's own files: the copy inside the wheel if there is one, else the folder beside the
    package in a checkout."""
    packaged = _PACKAGE / "_data" / kind
    return packaged if packaged.is_dir() else _PACKAGE.parent / kind


def files(kind: Kind, extra: Sequence[str | Path] = ()) -> dict[str, Path]:
    """Every name of a kind and the file that it means. A folder that comes earlier in `dirs` wins."""
    found: dict[str, Path] = {}
    for folder in dirs(kind, extra):
        for path in sorted(folder.rglob("*.yaml")):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return found


def find(
    kind: Kind,
    name: str,
    extra: Sequence[str | Path] = (),
    *,
    pos: Pos | None = None,
    below: Path | None = None,
) -> Path:
    """The file called `name`; SpecError at `pos`, with the nearest name, when there is none.

    `below` is a file whose own folder, and those before it, are passed over: a recipe that extends its
    own name means the one it stands in front of.
    """
    if _NAME.fullmatch(name):
        for folder in _after(dirs(kind, extra), below):
            if (path := folder / f"{name}.yaml").is_file():
                return path
    known = sorted(files(kind, extra))
    what = _SINGULAR[kind]
    raise SpecError(
        pos or Pos(f"{what} {name}"),
        f"there is no {what} `{name}`",
        expected="one of " + ", ".join(known) if known else "",
        hint=did_you_mean(name, known),
    )


def _after(folders: list[Path], below: Path | None) -> list[Path]:
    if below is None:
        return folders
    home = next((i for i, folder in enumerate(folders) if below.is_relative_to(folder)), -1)
    return folders[home + 1 :]


def search_path(extra: Sequence[str | Path] = ()) -> list[Path]:
    """The folders that were added to what is shipped, the ones that win first."""
    named = [(Path(entry), Pos("option path")) for entry in extra]
    return [_checked(path, pos) for path, pos in [*named, *_from_variable(), *_from_project()]]


def _checked(path: Path, pos: Pos) -> Path:
    path = path.expanduser().absolute()
    if not path.is_dir():
        raise SpecError(pos, f"there is no folder {path}", hint="correct the search path")
    if not any((path / kind).is_dir() for kind in KINDS):
        raise SpecError(
            pos,
            f"nothing to read in {path}",
            expected="a folder that holds " + "/, ".join(KINDS[:-1]) + f"/ or {KINDS[-1]}/",
        )
    return path


def _from_variable() -> Iterator[tuple[Path, Pos]]:
    text = os.environ.get(VARIABLE, "")
    column = 1
    for entry in text.split(os.pathsep):
        pos, column = Pos(VARIABLE, 1, column), column + len(entry) + 1
        if not entry.strip():
            continue  # by custom the working directory, which is never read
        path = Path(entry.strip()).expanduser()
        if not path.is_absolute():
            raise SpecError(pos, f"`{entry}` is not absolute", hint="write the whole path")
        yield path, pos


def _from_project() -> Iterator[tuple[Path, Pos]]:
    file = project_file()
    if file is None:
        return
    text = file.read_text(encoding="utf-8", errors="replace")
    table = _table(file, text)
    for key in table:
        if key != "path":
            hint = did_you_mean(key, ["path"])
            raise SpecError(_at(file, text, key), f"unknown key `{key}` in [tool.sitsopt]",
                            expected="path", hint=hint, path=f"tool.sitsopt.{key}")  # fmt: skip
    pos = _at(file, text, "path")
    entries = table.get("path", [])
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise SpecError(pos, "`path` is no list of text", expected='a list: ["tools/sitsopt"]',
                        path="tool.sitsopt.path")  # fmt: skip
    for entry in entries:
        yield file.parent / Path(entry).expanduser(), pos


def project_file() -> Path | None:
    """The nearest pyproject.toml above the running script; None in an interactive session.

    `__main__.__file__` and not `sys.path[0]`, which is the working directory under `python -m`.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if not script:
        return None
    folders = Path(script).resolve().parents
    return next((f / "pyproject.toml" for f in folders if (f / "pyproject.toml").is_file()), None)


def _table(file: Path, text: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(text).get("tool", {}).get("sitsopt", {})
    except tomllib.TOMLDecodeError as error:
        if "tool.sitsopt" not in text:
            return {}  # nothing in it is addressed to this project
        raise SpecError(Pos(str(file)), f"not valid TOML: {error}") from None
    if not isinstance(table, dict):
        raise SpecError(_at(file, text, "sitsopt"), "[tool.sitsopt] is no table")
    return table


def _at(file: Path, text: str, key: str) -> Pos:
    """Where a key of [tool.sitsopt] stands: tomllib keeps no positions."""
    start = re.search(r"^\s*\[tool\.sitsopt\]", text, re.MULTILINE)
    found = re.compile(rf"^\s*({re.escape(key)})\b", re.MULTILINE).search(
        text, start.end() if start else 0
    )
    if not found:
        return Pos(str(file))
    before = text[: found.start(1)]
    return Pos(str(file), before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
