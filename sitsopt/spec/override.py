"""`--set PATH=VALUE`: one value of a recipe changed, and checked as if it stood in the file.

`weights.*.group=64` reaches every entry of the list that has a scheme; an entry that says `skip` takes no
settings. `weights.0.group=64` reaches the first, `hooks.nvlink.apply=false` goes into maps, and VALUE is
YAML: a number, text, `[a, b]`, `{a: b}`, or null to take something back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import Pos, SpecError, did_you_mean
from .yamltree import Entry, Node, compose


@dataclass(frozen=True)
class _Step:
    text: str
    pos: Pos


def override(root: Node, text: str, known: Iterable[str]) -> Node:
    """The tree with `text` (`PATH=VALUE`) applied; the tree that was given stays as it is.

    `known` are the keys that the top of the file may have. Mistakes are placed in a file called
    `--set PATH=VALUE`, line 1, with the column of what is wrong.
    """
    name = f"--set {text}"
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise SpecError(Pos(name), "not of the form PATH=VALUE", expected="weights.*.group=64, say")
    steps, column = [], 1
    for part in path.split("."):
        if not part.strip():
            raise SpecError(Pos(name, 1, column), "an empty part of the path", expected="a key")
        steps.append(_Step(part.strip(), Pos(name, 1, column)))
        column += len(part) + 1
    return _put(root, steps, _value(value, name, len(path) + 2), list(known))


def _value(text: str, name: str, column: int) -> Node:
    if not text.strip():
        raise SpecError(Pos(name, 1, column), "no value", expected="a value; `null` takes one back")
    if text.lstrip()[0] in ">|":  # a block of text in YAML, which one line cannot hold: `>= 3`
        return Node("scalar", Pos(name, 1, column), text.strip())
    # Written at its own column, so that every place in it is right.
    return compose(" " * (column - 1) + text, name)


def _put(node: Node, steps: list[_Step], value: Node, known: list[str]) -> Node:
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    if node.kind == "list":
        return _put_in_list(node, step, rest, value)
    if node.kind != "map":
        raise SpecError(
            step.pos, f"there is nothing below `{node.value}`", expected="a shorter path"
        )
    if step.text == "*":
        raise SpecError(step.pos, "`*` stands for the items of a list", expected="a key")
    entry = node.entries.get(step.text)
    below = entry.value if entry else None
    if rest and (below is None or below.kind == "scalar"):
        if rest[0].text == "*" or rest[0].text.isdigit():
            names = [*map(str, node.entries), *known]
            raise SpecError(step.pos, f"there is no list `{step.text}` to change",
                            hint=did_you_mean(step.text, names))  # fmt: skip
        below = Node("map", step.pos)
    new = _put(below or Node("map", step.pos), rest, value, [])
    key = Node("scalar", step.pos, step.text)
    return Node("map", node.pos, entries={**node.entries, step.text: Entry(key, new)})


def _put_in_list(node: Node, step: _Step, rest: list[_Step], value: Node) -> Node:
    items = list(node.items)
    if step.text == "*":
        chosen = [i for i, item in enumerate(items) if "skip" not in item.entries]
        if not chosen:
            raise SpecError(step.pos, "no item of the list takes settings")
    elif step.text.isdigit() and int(step.text) < len(items):
        chosen = [int(step.text)]
    else:
        raise SpecError(step.pos, f"`{step.text}` is no item of the list",
                        expected=f"* or a number from 0 to {len(items) - 1}")  # fmt: skip
    for index in chosen:
        items[index] = _put(items[index], rest, value, [])
    return Node("list", node.pos, items=items)
