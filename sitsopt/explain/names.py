"""Short forms for people: thirty module paths as one, `file:line` without the path to the library, sizes, times."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

Segment = str | tuple[str, frozenset[int]]
_NUMBERED = re.compile(r"(.*?)(\d+)$")
_SERIAL = re.compile(r"_\d+(?=_|\b)")
_INPUT = re.compile(r"\b(arg\d+_\d+) = \1")
_LIBRARY = re.compile(r".*/(?:site|dist)-packages/")


def collapse(paths: Iterable[str]) -> list[str]:
    """`model.layers.{0..29}.mlp` for thirty paths that differ in a number, in order of first appearance. What
    stands for several sites of one module is marked: `model.layers.{1..29} ×2`."""
    found: list[str] = []
    counts = Counter(paths)
    for times in dict.fromkeys(counts.values()):
        mark = f" ×{times}" if times > 1 else ""
        found += [p + mark for p in _merged(p for p, n in counts.items() if n == times)]
    return found


def parts(paths: Iterable[str], most: int) -> list[str]:
    """The first few of the collapsed paths, and how many more there are."""
    short = [p or "the model itself" for p in collapse(paths)]
    more = [f"and {len(short) - most} more"] if len(short) > most else []
    return short[:most] + more


def where(paths: Iterable[str], most: int = 3) -> str:
    """The collapsed paths on one line, the first few of them."""
    return ", ".join(parts(paths, most)).replace(", and ", " and ")


def _merged(paths: Iterable[str]) -> list[str]:
    rows: list[tuple[Segment, ...]] = [tuple(p.split(".")) for p in paths]
    for position in reversed(range(max(map(len, rows), default=0))):
        groups: dict[tuple[object, ...], tuple[Segment, ...]] = {}
        for row in rows:
            cut = _NUMBERED.match(row[position]) if position < len(row) else None  # type: ignore[arg-type]
            if cut is None:
                groups[("", row)] = row
                continue
            key = (row[:position], cut[1], row[position + 1 :])
            before = groups[key][position] if key in groups else ("", frozenset())
            assert isinstance(before, tuple)
            one = (cut[1], before[1] | {int(cut[2])})
            groups[key] = (*row[:position], one, *row[position + 1 :])
        rows = list(groups.values())
    return [".".join(s if isinstance(s, str) else s[0] + ranges(s[1]) for s in row) for row in rows]


def ranges(numbers: Iterable[int]) -> str:
    """`{0..3,7}` for 0 1 2 3 7; a single number stands alone."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    only = len(runs) == 1 and len(runs[0]) == 1
    return parts[0] if only else "{" + ",".join(parts) + "}"


def tidy(text: str) -> str:
    """What the matcher found, without the names that capture gave to the graph's inputs."""
    return _INPUT.sub("an input of the graph", text)


def alike(text: str) -> str:
    """A text without the serial numbers of graph nodes: what two layers' misses have in common."""
    return _SERIAL.sub("", tidy(text))


def short(source: str) -> str:
    """`transformers/models/llama/modeling_llama.py:155`: inside a library its own path, else from here."""
    cut = _LIBRARY.sub("", source)
    here = str(Path.cwd()) + "/"
    return cut.removeprefix(here)


def size(count: float | None) -> str:
    """Bytes in units of 1000; `?` when a size is symbolic."""
    if count is None:
        return "?"
    sign, value, units = (
        ("-" if count < 0 else ""),
        float(abs(count)),
        ["TB", "GB", "MB", "kB", "B"],
    )
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop()
    unit = units[-1]
    digits = 0 if value >= 99.5 or unit == "B" else 1
    return f"{sign}{value:.{digits}f} {unit}"


def micros(time: float | None) -> str:
    """A time given in microseconds; `?` when it is unknown."""
    if time is None:
        return "?"
    for limit, scale, unit in ((999.5, 1.0, "us"), (999.5e3, 1e3, "ms")):
        if time < limit:
            return f"{time / scale:.3g} {unit}"
    return f"{time / 1e6:.3g} s"


def plural(count: int, word: str) -> str:
    """`1 site`, `2 sites`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
