"""Data files: read once, as plain data that still knows the line and column of every key and value.

document = read("rules/fuse/swiglu.yaml")
document.data["summary"], document.at(("summary",))
recipe = build(Recipe, document)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from .errors import Pos, SpecError, raise_all
from .validate import Spec, validate
from .yamltree import Entry, Node, compose, plain

__all__ = ["Document", "Spec", "build", "dotted", "read", "read_text"]

MAX_BYTES = 1_000_000

PathIn = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Document:
    """One file: its plain data and where everything in it stands."""

    file: str
    data: Any
    text: str
    root: Node = field(repr=False)

    @staticmethod
    def of(data: Any, name: str) -> Document:
        """Data that came from Python rather than from a file: every place is the start of `name`."""
        return Document(name, data, "", Node("map", Pos(name)))

    def at(self, path: PathIn, key: bool = False) -> Pos:
        """Where the value at `path` starts, or its key. A path that leads nowhere ends at its last
        existing part, so that a missing key points at the map it is missing from."""
        return self._find(path, key).pos

    def inside(self, path: PathIn, line: int, column: int, key: bool = False) -> Pos:
        """Where line `line`, column `column` (from 0) of the text at `path` stands in the file."""
        node = self._find(path, key)
        if node.style in ("|", ">"):
            return self._inside_block(node, line, column)
        shift = 1 if node.style in ("'", '"') else 0
        if line or not self._stands_as_is(node, shift):
            return node.pos
        return Pos(node.pos.file, node.pos.line, node.pos.column + shift + column)

    def _find(self, path: PathIn, key: bool) -> Node:
        node, at = self.root, self.root
        for part in path:
            entry = _child(node, part)
            if entry is None:
                return at
            at = entry.key if key else entry.value
            node = entry.value
        return at

    def _inside_block(self, node: Node, line: int, column: int) -> Pos:
        rows, lines = str(node.value).split("\n"), self.text.split("\n")
        for row, content in enumerate(rows):
            raw = (
                lines[node.pos.line + row].rstrip("\r") if node.pos.line + row < len(lines) else ""
            )
            if content.strip() and raw.endswith(content):
                indent = len(raw) - len(content)
                return Pos(self.file, node.pos.line + 1 + line, indent + column + 1)
        return node.pos  # folded text, where lines no longer correspond

    def _stands_as_is(self, node: Node, shift: int) -> bool:
        lines = self.text.split("\n")
        if node.pos.line > len(lines):
            return False
        return lines[node.pos.line - 1].startswith(str(node.value), node.pos.column - 1 + shift)


def read(path: str | Path, text: str | None = None) -> Document:
    """The document in the file at `path`, or in `text` when it is given (then `path` is only a name)."""
    file = str(path)
    if text is None:
        text = read_text(path)
    elif len(text) > MAX_BYTES:
        raise _too_large(file)
    text = text.removeprefix("\ufeff")
    root = compose(text, file)
    return Document(file, plain(root), text, root)


def read_text(path: str | Path) -> str:
    """The text of a file, with every way in which reading can fail told as a SpecError."""
    file, path = str(path), Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(Pos(file), "there is no such file") from None
    except IsADirectoryError:
        raise SpecError(Pos(file), "this is a directory", expected="a YAML file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(Pos(file), f"the file cannot be read: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise _too_large(file)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise SpecError(Pos(file, line, column), "this is not UTF-8 text") from None


def build(model: type[M], doc: Document, data: Any = None, path: PathIn = ()) -> M:
    """The document, or the part of it at `path`, as an instance of `model`.

    `data` replaces what stands at `path` (defaults merged in, say); errors still point into the file.
    Raises SpecError for one mistake and SpecErrors for several.
    """
    if data is None:
        data = doc.data
        for part in path:
            data = data[part]
    value, findings = validate(model, data)
    errors = [
        SpecError(
            doc.at(path + finding.path, key=finding.on_key), finding.problem,
            expected=finding.expected, hint=finding.hint, path=dotted(path + finding.path),
        )
        for finding in findings
    ]  # fmt: skip
    raise_all(errors)
    assert value is not None
    return value


def dotted(path: PathIn) -> str:
    """A path as text: `rules[2].weights.group_0`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _child(node: Node, part: str | int) -> Entry | None:
    if node.kind == "list":
        inside = isinstance(part, int) and 0 <= part < len(node.items)
        return Entry(node.items[int(part)], node.items[int(part)]) if inside else None
    if node.kind != "map":
        return None
    if part in node.entries:
        return node.entries[part]
    # JSON-style paths spell integer keys as text.
    return next((entry for name, entry in node.entries.items() if str(name) == str(part)), None)


def _too_large(file: str) -> SpecError:
    return SpecError(Pos(file), f"the file is larger than {MAX_BYTES // 1000} kB")
