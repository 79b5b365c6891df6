"""The selectors of a recipe: which modules `match:` means.

| written            | selects                                                                        |
|--------------------|--------------------------------------------------------------------------------|
| `lm_head`          | the module of that full name, and every module below it                        |
| `model.layers.*`   | what stands at or below any module one segment below `model.layers`            |
| `**.mlp`           | the same for a module `mlp` at any depth: `**` is any number of segments, or none |
| `layers.?.*_proj`  | inside a segment `*`, `?` and `[...]` are those of a shell                     |
| `re:.*\\.[qkv]_proj` | the modules whose full name the expression matches from end to end           |
| `class:LlamaMLP`   | what stands at or below a module of that class, or of a class derived from it  |

A pattern is compared segment by segment with the full dotted name, from the root. So `layers.1` never
means `layers.10`, nor `mlp.gate` the module `mlp.gate_proj`, nor `lm_head` the module `my_lm_head2`.
Whoever asks gives the names that can be chosen - for weights, the linear layers: `model.layers.*` then
means every linear layer below every layer. A pattern that selects nothing is an error.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from .errors import Pos, SpecError, did_you_mean

Classes = Mapping[str, Sequence[str]]

_SEGMENT = re.compile(r"[\w\-*?]|\[!?[^\].]+\]")


def select(
    names: Iterable[str], pattern: str, classes: Classes | None = None, *, pos: Pos | None = None
) -> list[str]:
    """Those of `names` (dotted module names) that `pattern` selects, in their order.

    `classes` gives for every module of the model the names of its class and of its base classes.
    Raises SpecError at `pos` for a pattern that is malformed or selects nothing.
    """
    names = list(names)
    chosen = selector(pattern, classes or {}, pos)
    found = [name for name in names if chosen(name)]
    if not found:
        raise _nothing(names, pattern, classes or {}, pos or Pos(f"match: {pattern}"))
    return found


def selector(
    pattern: str, classes: Classes | None = None, pos: Pos | None = None
) -> Callable[[str], bool]:
    """A pattern as a test of one name. Raises SpecError for a malformed pattern."""
    pos = pos or Pos(f"match: {pattern}")
    if pattern.startswith("re:"):
        return _expression(pattern, pos)
    if pattern.startswith("class:"):
        return _class(pattern.removeprefix("class:"), classes or {}, pos)
    segments = _segments(pattern, pos)
    return lambda name: _covers(segments, name.split("."))


def _expression(pattern: str, pos: Pos) -> Callable[[str], bool]:
    try:
        expression = re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        at = pos.shifted(0, len("re:") + (error.pos or 0))
        raise SpecError(at, f"not a regular expression: {error.msg}") from None
    return lambda name: expression.fullmatch(name) is not None


def _class(wanted: str, classes: Classes, pos: Pos) -> Callable[[str], bool]:
    if not wanted.isidentifier():
        raise SpecError(pos, f"`{wanted}` is no class name", expected="class:LlamaMLP, say")
    roots = [name for name, bases in classes.items() if wanted in bases]
    return lambda name: any(root in ("", name) or name.startswith(f"{root}.") for root in roots)


def _segments(pattern: str, pos: Pos) -> list[str]:
    segments, column = pattern.split("."), 0
    for segment in segments:
        if segment != "**":
            _check_segment(segment, pattern, pos.shifted(0, column))
        column += len(segment) + 1
    return segments


def _covers(pattern: Sequence[str], name: Sequence[str]) -> bool:
    """Whether the pattern names the module or one above it."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_covers(pattern[1:], name[start:]) for start in range(len(name) + 1))
    return (
        bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _covers(pattern[1:], name[1:])
    )


def _check_segment(segment: str, pattern: str, pos: Pos) -> None:
    if not segment:
        raise SpecError(pos, f"an empty segment in `{pattern}`", hint="names are joined by one dot")
    if "**" in segment:
        raise SpecError(pos, f"`**` inside the segment `{segment}`", expected="`**` between dots")
    rest = _SEGMENT.sub("", segment)
    if rest:
        raise SpecError(
            pos.shifted(0, segment.index(rest[0])),
            f"`{rest[0]}` in `{pattern}`",
            expected="a dotted name with *, ?, [...] or **",
            hint="write a regular expression as re:...",
        )


def _nothing(names: Sequence[str], pattern: str, classes: Classes, pos: Pos) -> SpecError:
    problem = f"`{pattern}` selects no module"
    if pattern.startswith("class:"):
        known = sorted({bases[0] for bases in classes.values() if bases})
        hint = did_you_mean(pattern.removeprefix("class:"), known)
        return SpecError(pos, problem, expected="the class of a module of this model", hint=hint)
    if pattern.startswith("re:"):
        hint = "the expression must match a whole name, such as " + names[0] if names else ""
        return SpecError(pos, problem, hint=hint)
    deeper = f"**.{pattern}"
    if not pattern.startswith("**") and any(map(selector(deeper), names)):
        return SpecError(pos, problem, hint=f"names count from the root: write `{deeper}`")
    return SpecError(pos, problem, hint=did_you_mean(pattern, _forms(names)))


def _forms(names: Iterable[str]) -> list[str]:
    """Every name, every module above it, and both with `*` for the numbers."""
    forms: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            forms[".".join(parts[:end])] = None
            forms[".".join("*" if part.isdigit() else part for part in parts[:end])] = None
    return list(forms)
