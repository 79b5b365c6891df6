"""The stress report as a picture that needs no other file: acceptance and worth by draft length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any
from xml.sax.saxutils import escape

WIDE, HIGH, LEFT, TOP = 230, 130, 50, 34  # pixels of a panel, and of what stands around it
COLOURS = ("#1864ab", "#2b8a3e", "#e67700", "#c92a2a", "#7048a8")

Points = list[tuple[float, float]]


def svg(rows: Sequence[dict[str, Any]]) -> str:
    """A row of panels for each text: for each draft acceptance, then plain time over speculative time; a line for each temperature."""
    texts, drafts, heats = ([*dict.fromkeys(row[k] for row in rows)] for k in ("text", "draft", "temperature"))  # fmt: skip
    colours = {heat: COLOURS[i % len(COLOURS)] for i, heat in enumerate(heats)}
    wide = 2 * len(drafts) * (WIDE + LEFT) + 20
    high = len(texts) * (HIGH + TOP + 24) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" font-family="sans-serif" font-size="10" fill="currentColor">'
    ]
    for place, heat in enumerate(heats):
        parts.append(f'<rect x="{LEFT + 120 * place}" y="4" width="10" height="3" fill="{colours[heat]}"/>')  # fmt: skip
        parts.append(f'<text x="{LEFT + 14 + 120 * place}" y="10">temperature {heat:g}</text>')
    for row, kind in enumerate(texts):
        y = 20 + row * (HIGH + TOP + 24) + TOP - 10
        for column, draft in enumerate(drafts):
            mine = [one for one in rows if (one["text"], one["draft"]) == (kind, draft)]
            for half, (name, value) in enumerate((("accepted", _accepted), ("plain time / its time", _worth))):  # fmt: skip
                x = LEFT + (2 * column + half) * (WIDE + LEFT)
                lines = {colours[h]: _line(mine, h, value) for h in heats}
                parts += _panel(x, y, f"{kind}: {draft}, {name}", lines)
    return "\n".join([*parts, "</svg>"])


def _accepted(row: dict[str, Any]) -> float | None:
    return row["accepted"] / row["proposed"] if row["proposed"] else None


def _worth(row: dict[str, Any]) -> float | None:
    return float(row["ratio"])


def _line(rows: Sequence[dict[str, Any]], heat: float, value: Any) -> Points:
    found = [(float(r["length"]), value(r)) for r in rows if r["temperature"] == heat]
    return [(x, y) for x, y in found if y is not None]


def _panel(x: int, y: int, title: str, lines: dict[str, Points]) -> Iterator[str]:
    """Axes from 0 to the largest value, at least 1, with a line at 1."""
    points = [p for line in lines.values() for p in line]
    most = max([1.0, *(v for _, v in points)])
    longest = max([1.0, *(n for n, _ in points)])

    def at(point: tuple[float, float]) -> str:
        return f"{x + WIDE * point[0] / longest:.1f},{y + HIGH * (1 - point[1] / most):.1f}"

    yield f'<text x="{x}" y="{y - 6}">{escape(title)}</text>'
    yield f'<path d="M{x},{y} V{y + HIGH} H{x + WIDE}" fill="none" stroke="currentColor"/>'
    yield f'<path d="M{at((0, 1))} L{at((longest, 1))}" stroke="currentColor" stroke-dasharray="3" opacity="0.5"/>'
    for value in (0.0, 1.0, *([most] if most > 1.2 else [])):
        place = y + HIGH * (1 - value / most)
        yield f'<text x="{x - 4}" y="{place + 3:.1f}" text-anchor="end">{value:.3g}</text>'
    for length, _ in groupby(sorted(n for n, _ in points)):
        yield f'<text x="{x + WIDE * length / longest:.1f}" y="{y + HIGH + 12}" text-anchor="middle">{length:g}</text>'
    for colour, line in lines.items():
        if line:
            yield f'<polyline points="{" ".join(map(at, line))}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        for point in line:
            px, py = at(point).split(",")
            yield f'<circle cx="{px}" cy="{py}" r="2.5" fill="{colour}"><title>{point[0]:g} tokens: {point[1]:.3f}</title></circle>'
