"""One file on top of another: maps merge by key, lists and scalars replace, null removes.

It works on nodes that know where they stand, so that every value of the result still names the file and
line that set it, and an error in the result points there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .errors import SpecError
from .source import Document, read
from .yamltree import Entry, Node, plain


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`; neither is changed.

    A null stays in the result, as the value of its key: the models read it as "not set", and a later
    layer may set it again. That keeps the key where a misspelt one is still an error.
    """
    if base.kind != "map" or over.kind != "map":
        return over
    result = Node("map", over.pos, entries=dict(base.entries))
    for name, entry in over.entries.items():
        below = base.entries.get(name)
        value = merge(below.value, entry.value) if below else entry.value
        result.entries[name] = Entry(entry.key, value)
    return result


def document(root: Node, name: str) -> Document:
    """A merged tree as a document. Its places are those of the files that it came from."""
    return Document(name, plain(root), "", root)


def read_map(path: Path) -> Document:
    """The document at `path`, which must be a map of keys."""
    doc = read(path)
    if doc.root.kind != "map":
        raise SpecError(doc.root.pos, "this is no map of keys", expected="`key: value` lines")
    return doc


def bases(doc: Document, path: Path, find: Callable[[str, Document, Path], Path]) -> list[Path]:
    """The files that `doc`, read from `path`, extends, the lowest first. `find` turns a name that a
    document gives into a file."""
    seen = [path]
    while (name := _extends(doc)) is not None:
        below = find(name, doc, seen[-1])
        if below in seen:
            loop = " > ".join(p.stem for p in [*seen, below])
            raise SpecError(
                doc.at(("extends",)), f"`extends` goes in a circle: {loop}", path="extends"
            )
        seen.append(below)
        doc = read_map(below)
    return seen[:0:-1]


def _extends(doc: Document) -> str | None:
    name = doc.data.get("extends")
    if name is not None and not isinstance(name, str):
        raise SpecError(
            doc.at(("extends",)), "`extends` is no name", expected="a file's name", path="extends"
        )
    return name
