"""One file on top of another: maps merge by key, lists and scalars replace, null removes.

It works on nodes that know where they stand, so that every value of the result still names the file and
line that set it, and an error in the result points there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel

from .errors import Pos, SpecError
from .fields import fields_at
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


def from_data(data: object, pos: Pos) -> Node:
    """Plain data that came from Python as a tree; everything in it stands at `pos`."""
    if isinstance(data, Mapping):
        entries = {
            key: Entry(Node("scalar", pos, key), from_data(value, pos))
            for key, value in data.items()
        }
        return Node("map", pos, entries=entries)
    if isinstance(data, list | tuple):
        return Node("list", pos, items=[from_data(item, pos) for item in data])
    return Node("scalar", pos, data)  # type: ignore[arg-type]  # `build` refuses what is not plain


def without_null(root: Node, model: type[BaseModel], path: tuple[str | int, ...] = ()) -> Node:
    """The tree without the nulls that took something back. One under a key that `model` does not know
    stays, so that the misspelt key is reported."""
    if root.kind == "list":
        items = [without_null(item, model, (*path, i)) for i, item in enumerate(root.items)]
        return Node("list", root.pos, items=items)
    if root.kind != "map":
        return root
    known = fields_at(model, path)
    entries = {
        name: Entry(entry.key, without_null(entry.value, model, (*path, name)))
        for name, entry in root.entries.items()
        if not is_null(entry.value) or (known and name not in known)
    }
    return Node("map", root.pos, entries=entries)


def is_null(node: Node) -> bool:
    """Whether a node is a null, which takes back what stands below it."""
    return node.kind == "scalar" and node.value is None


def text_at(doc: Document, path: tuple[str | int, ...]) -> Pos:
    """Where the text of a scalar starts, behind its quote."""
    node = doc.root
    for part in path:
        node = node.items[part] if isinstance(part, int) else node.entries[part].value
    return node.pos.shifted(0, 1) if node.style in ("'", '"') else node.pos


def document(root: Node, name: str) -> Document:
    """A merged tree as a document. Its places are those of the files that it came from."""
    return Document(name, plain(root), "", root)


def read_map(path: Path) -> Document:
    """The document at `path`, which must be a map of keys. Read again only when the file changed."""
    try:
        state = path.stat()
    except OSError:
        doc = read(path)  # which tells what is wrong
    else:
        doc = _read(path, state.st_mtime_ns, state.st_size)
    if doc.root.kind != "map":
        raise SpecError(doc.root.pos, "this is no map of keys", expected="`key: value` lines")
    return doc


@lru_cache(maxsize=256)
def _read(path: Path, mtime_ns: int, size: int) -> Document:
    return read(path)  # nothing changes a document: `merge` and `override` build new trees


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
