"""A story as one HTML page that needs no other file and no network."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from . import misses
from .names import micros, short, size, where
from .sites import Spot, step, sums
from .story import Story
from .text import caches, lowered

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Cell:
    """One rule in one layer. `shade` goes from 0 to 1 with the logarithm of the bytes saved."""

    value: int
    shade: float
    title: str


@dataclass(frozen=True)
class Row:
    """One rule over all layers."""

    rule: str
    cells: list[Cell]
    total: str


@dataclass(frozen=True)
class Heat:
    """Where one step saves bytes."""

    step: str
    rows: list[Row]


def as_html(story: Story) -> str:
    """The page."""
    shown = story.shown
    chosen = {id(a) for g in shown for a in g.attempts}
    further: dict[str, list[misses.Group]] = {}
    for group in misses.groups(a for a in story.attempts if id(a) not in chosen):
        further.setdefault(group.miss.rule, []).append(group)
    record = story.record
    return _template().render(
        recipe=record.recipe or "?", target=record.target or "?", bandwidth=story.bandwidth_gbs,
        notes=story.notes, graphs=record.graphs, heats=heats(story), rules=_rules(story),
        cache=story.cache, recorded=story.recorded, shown=shown, further=further,
        effective=list(dict.fromkeys(record.effective)),
        where=where, size=size, micros=micros, short=short,
    )  # fmt: skip


def heats(story: Story) -> list[Heat]:
    """A map for each step in which some rule saved bytes in some numbered layer."""
    steps = dict.fromkeys(step(g.name) for g in story.record.graphs)
    maps = (_heat(story, name) for name in steps)
    return [one for one in maps if one.rows]


@cache
def _template() -> Template:
    text = (Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8")
    env = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return env.from_string(text)


def _rules(story: Story) -> list[dict[str, Any]]:
    return [
        {
            "id": rule, "summary": story.rules.get(rule, ""), "spots": found,
            "where": where(s.module for s in found), "lowered": lowered(found), "totals": sums(found),
            "caches": list(caches(found)),
        }
        for rule, found in story.spots.items()
    ]  # fmt: skip


def _heat(story: Story, name: str) -> Heat:
    saved = {rule: _by_layer(found, name) for rule, found in story.spots.items()}
    saved = {rule: layers for rule, layers in saved.items() if any(layers.values())}
    numbers = [n for layers in saved.values() for n in layers if n is not None]
    if not numbers:
        return Heat(name, [])
    columns = [*range(max(numbers) + 1), None]
    most = max(abs(v) for layers in saved.values() for v in layers.values())
    return Heat(name, [
        Row(rule, [_cell(rule, n, layers.get(n, 0), most) for n in columns], size(sum(layers.values())))
        for rule, layers in saved.items()
    ])  # fmt: skip


def _by_layer(found: Iterable[Spot], name: str) -> dict[int | None, int]:
    """Bytes saved in one step by layer; None is what lies outside the layers."""
    layers: dict[int | None, int] = {}
    for spot in found:
        cut = _LAYER.search(spot.module)
        layer = int(cut[1]) if cut else None
        for graph, site in spot.graphs.items():
            if step(graph) == name:
                layers[layer] = layers.get(layer, 0) + (site.bytes_saved or 0)
    return layers


def _cell(rule: str, layer: int | None, value: int, most: int) -> Cell:
    shade = math.log1p(max(value, 0)) / math.log1p(most) if most else 0.0
    place = "outside the layers" if layer is None else f"layer {layer}"
    return Cell(value, round(max(shade, 0.08), 2), f"{rule}, {place}: {size(value)}")
