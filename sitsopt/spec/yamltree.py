"""YAML 1.2 text as a tree of nodes that know where they stand.

Built straight from the parser's events, so that depth, aliases and size are bounded before anything is
expanded, and so that every key and value keeps its line and column. Only the core schema is spoken:
maps, lists, text, integers, floats, booleans, null. A tag that would build anything else is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from .errors import Pos, SpecError

MAX_DEPTH = 40
MAX_ALIASES = 200
MAX_NODES = 100_000  # counted after aliases are expanded
MAX_DIGITS = 400

Scalar = str | int | float | bool | None

_TAG = "tag:yaml.org,2002:"
_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NON_FINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


@dataclass(slots=True)
class Node:
    """One value. `kind` is `map`, `list` or `scalar`; `style` is the scalar's quote or block mark."""

    kind: str
    pos: Pos
    value: Scalar = None
    style: str = ""
    tag: str = ""
    items: list[Node] = field(default_factory=list)
    entries: dict[str | int, Entry] = field(default_factory=dict)
    size: int = 1  # nodes below and at this one, aliases expanded


@dataclass(slots=True)
class Entry:
    """A key of a map with its value. A merged entry came from `<<` and may be overridden."""

    key: Node
    value: Node
    merged: bool = False


def compose(text: str, file: str) -> Node:
    """The one document of `text`. Raises SpecError at the place of the first mistake."""
    return _Composer(file).document(text)


def plain(node: Node) -> Any:
    """The node as plain dicts, lists and scalars."""
    if node.kind == "map":
        return {key: plain(entry.value) for key, entry in node.entries.items()}
    if node.kind == "list":
        return [plain(item) for item in node.items]
    return node.value


class _Composer:
    def __init__(self, file: str) -> None:
        self.file = file
        self.anchors: dict[str, Node | None] = {}
        self.aliases = 0
        self.events: Iterator[Any] = iter(())

    def document(self, text: str) -> Node:
        self.events = self._parse(text)
        next(self.events)  # the start of the stream
        event = next(self.events)
        if type(event).__name__ != "DocumentStartEvent":
            raise SpecError(Pos(self.file), "the file is empty", expected="a map of keys")
        if event.version is not None and tuple(event.version) != (1, 2):
            version = ".".join(str(part) for part in event.version)
            raise SpecError(self._pos(event), f"YAML {version} is asked for", expected="YAML 1.2")
        root = self._node(next(self.events), 0)
        next(self.events)  # the end of the document
        event = next(self.events)
        if type(event).__name__ != "StreamEndEvent":
            raise SpecError(self._pos(event), "a second document", expected="one document a file")
        return root

    def _parse(self, text: str) -> Iterator[Any]:
        try:
            yield from YAML(typ="safe", pure=True).parse(text)
        except SpecError:
            raise
        except MarkedYAMLError as error:
            raise self._syntax_error(error, text) from None
        except ReaderError as error:
            before = text[: error.position]
            pos = Pos(self.file, before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
            raise SpecError(pos, "a character that YAML does not allow") from None
        # The parser lets some malformed text through to chr(), int() or an index of its own.
        except (YAMLError, ValueError, ArithmeticError, LookupError, TypeError,
                AttributeError, AssertionError, RecursionError) as error:  # fmt: skip
            raise SpecError(Pos(self.file), f"not valid YAML: {error}") from None

    def _syntax_error(self, error: MarkedYAMLError, text: str) -> SpecError:
        mark = error.problem_mark or error.context_mark
        pos = Pos(self.file, mark.line + 1, mark.column + 1) if mark else Pos(self.file)
        lines = text.splitlines()
        line = lines[pos.line - 1] if pos.line <= len(lines) else ""
        if line[pos.column - 1 : pos.column] == "\t":
            return SpecError(pos, "a tab used as indentation", hint="indent with spaces")
        told = ": ".join(part for part in (error.context, error.problem) if part)
        return SpecError(pos, f"not valid YAML: {told}")

    def _pos(self, event: Any) -> Pos:
        return Pos(self.file, event.start_mark.line + 1, event.start_mark.column + 1)

    def _node(self, event: Any, depth: int) -> Node:
        kind = type(event).__name__
        if kind == "AliasEvent":
            return self._alias(event)
        if depth > MAX_DEPTH:
            raise SpecError(self._pos(event), f"nested more than {MAX_DEPTH} levels deep")
        if event.anchor:
            self.anchors[event.anchor] = None  # open: an alias to it from inside would be a cycle
        if kind == "ScalarEvent":
            node = self._scalar(event)
        elif kind == "SequenceStartEvent":
            node = self._list(event, depth)
        else:
            node = self._map(event, depth)
        if node.size > MAX_NODES:
            raise SpecError(node.pos, f"more than {MAX_NODES} values once aliases are expanded")
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def _alias(self, event: Any) -> Node:
        self.aliases += 1
        if self.aliases > MAX_ALIASES:
            raise SpecError(self._pos(event), f"more than {MAX_ALIASES} aliases")
        if event.anchor not in self.anchors:
            raise SpecError(self._pos(event), f"`*{event.anchor}` names no anchor")
        node = self.anchors[event.anchor]
        if node is None:
            raise SpecError(self._pos(event), f"`*{event.anchor}` contains itself")
        return node

    def _list(self, event: Any, depth: int) -> Node:
        self._check_tag(event, "seq", "list")
        node = Node("list", self._pos(event))
        while type(child := next(self.events)).__name__ != "SequenceEndEvent":
            node.items.append(self._node(child, depth + 1))
        node.size += sum(item.size for item in node.items)
        return node

    def _map(self, event: Any, depth: int) -> Node:
        self._check_tag(event, "map", "map")
        node = Node("map", self._pos(event))
        merges: list[Node] = []
        while type(child := next(self.events)).__name__ != "MappingEndEvent":
            key = self._node(child, depth + 1)
            value = self._node(next(self.events), depth + 1)
            if value.value is None and value.kind == "scalar":
                value.pos = key.pos  # an absent value has no place but that of its key
            node.size += key.size + value.size
            if key.value == "<<" and not key.style:
                if merges:
                    raise SpecError(key.pos, "`<<` stands twice in this map", hint="give it a list")
                merges = self._merged(value)
            else:
                self._add(node, key, value)
        for source in merges:  # keys of the map itself win, then earlier sources
            for name, entry in source.entries.items():
                node.entries.setdefault(name, Entry(entry.key, entry.value, merged=True))
        return node

    def _merged(self, value: Node) -> list[Node]:
        sources = value.items if value.kind == "list" else [value]
        for source in sources:
            if source.kind != "map":
                raise SpecError(source.pos, "`<<` merges maps", expected="a map or a list of maps")
        return sources or [Node("map", value.pos)]

    def _add(self, node: Node, key: Node, value: Node) -> None:
        name = key.value
        if key.kind != "scalar" or isinstance(name, bool | float) or name is None:
            shown = f"a {key.kind}" if key.kind != "scalar" else f"`{_text(name)}`"
            raise SpecError(
                key.pos,
                f"{shown} as a key",
                expected="text",
                hint="put it in quotes to make it text",
            )
        if name in node.entries:
            first = node.entries[name].key.pos
            lines = f"lines {first.line} and {key.pos.line}"
            if first.line == key.pos.line:
                lines = f"line {first.line}, columns {first.column} and {key.pos.column}"
            raise SpecError(
                key.pos,
                f"the key `{name}` stands twice in this map: {lines}",
                expected="each key once",
                hint="remove one of the two",
            )
        node.entries[name] = Entry(key, value)

    def _check_tag(self, event: Any, *allowed: str) -> str:
        tag = event.tag or ""
        if not tag or (tag == "!" and allowed[0] != "map"):
            return ""
        short = tag.removeprefix(_TAG)
        if not tag.startswith(_TAG) or short not in allowed:
            raise SpecError(
                self._pos(event), f"the tag `{tag}` is not allowed here", expected="plain YAML",
                hint="remove the tag: data files hold text, numbers, lists and maps only",
            )  # fmt: skip
        return short

    def _scalar(self, event: Any) -> Node:
        pos, text, style = self._pos(event), event.value, event.style or ""
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise SpecError(pos, "half of a surrogate pair in text")
        tag = self._check_tag(event, "str", "int", "float", "bool", "null")
        if tag == "str" or event.tag == "!" or (style and not tag):
            return Node("scalar", pos, text, style)
        value = self._resolve(text, pos)
        if tag == "float" and type(value) is int:
            value = float(value)
        if tag and type(value).__name__ != {"null": "NoneType"}.get(tag, tag):
            raise SpecError(pos, f"`{text}` is not of the type its tag names, `{tag}`")
        return Node("scalar", pos, value, style)

    def _resolve(self, text: str, pos: Pos) -> Scalar:
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if len(text) > MAX_DIGITS and text[:1] in "+-.0123456789":
            return text
        if _INT.fullmatch(text):
            return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        if _FLOAT.fullmatch(text):
            value = float(text)
            if math.isinf(value):
                raise SpecError(pos, f"`{text}` is too large for a float", hint="write `.inf`")
            return value
        if match := _NON_FINITE.fullmatch(text):
            return math.nan if match[1] is None else float(f"{match[1]}inf")
        return text


def is_number(text: str) -> bool:
    """Whether plain text would be read as a number."""
    return bool(_INT.fullmatch(text) or _FLOAT.fullmatch(text))


def _text(value: Scalar) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
