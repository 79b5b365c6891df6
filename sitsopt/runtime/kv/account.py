"""What a model's last quantized cache held, layer by layer: for `report`, and as a picture."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any
from xml.sax.saxutils import escape

from ...graph.kv.tiers import HOT, PACKED, RECENT, SINKS, Tiers, tiers

COLOURS = {PACKED: "#9ec5e8", HOT: "#d9480f", SINKS: "#7048a8", RECENT: "#2b8a3e"}
NAMES = {PACKED: "packed", HOT: "hot, in full", SINKS: "with sinks", RECENT: "recent, in full"}
CELL = 8  # pixels a tile


@dataclass(frozen=True)
class Account:
    """Of one cache: its policy, and by number the layers that are quantized and hold something."""

    policy: str
    layers: dict[int, Tiers]

    def json(self) -> dict[str, Any]:
        """Plain data: sums, then each layer."""
        every = [*self.layers.values()]
        names = dict.fromkeys(name for one in every for name in one.in_use)
        used = {name: sum(one.in_use[name] for one in every) for name in names}
        full = sum(one.full for one in every)
        return {
            "policy": self.policy,
            "tokens": max((one.tokens for one in every), default=0),
            "in_use": used,
            "allocated": sum(one.allocated for one in every),
            "full": full,
            "ratio": sum(used.values()) / full if full else 0.0,
            "layers": {number: asdict(one) for number, one in self.layers.items()},
        }

    def lines(self) -> Iterator[str]:
        """A few lines of text."""
        sums = self.json()
        used = sums["in_use"]
        yield (
            f"cache, {self.policy}: {sums['tokens']:,} tokens take {sum(used.values()) / 1e6:,.2f} MB of"
            f" {sums['allocated'] / 1e6:,.2f} allocated, {sums['ratio']:.3f} of what they take in full"
        )
        yield "  " + ", ".join(f"{name} {size / 1e6:,.2f} MB" for name, size in used.items())
        for number, one in self.layers.items():
            hot = ", ".join(f"{t}@{h} {rate:.3g}" for _, h, t, rate in one.hottest[:3])
            yield (
                f"  layer {number}: {one.bits:.2f} bits a value, {one.promoted} tiles kept in full, {one.demoted} packed"
                + f"; hottest (tile@head, attention by query, of a group's heads): {hot}"
                * bool(hot)
            )

    def svg(self) -> str:
        """A picture, layers by positions, that needs no other file."""
        wide = max((len(one.map) for one in self.layers.values()), default=0) * CELL + 60
        high = len(self.layers) * CELL + 34
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(wide, 460)} {high}" width="{max(wide, 460)}" height="{high}" font-family="sans-serif" font-size="9" fill="currentColor">'
        ]
        for place, (mark, name) in enumerate(NAMES.items()):
            parts.append(f'<rect x="{60 + 100 * place}" y="2" width="8" height="8" fill="{COLOURS[mark]}"/>')  # fmt: skip
            parts.append(f'<text x="{72 + 100 * place}" y="10">{escape(name)}</text>')
        for row, (number, one) in enumerate(self.layers.items()):
            y = 18 + row * CELL
            parts.append(f'<text x="0" y="{y + 7}">layer {number}</text>')
            parts += _cells(one, y)
        parts.append(f'<text x="60" y="{high - 4}">position, 64 tokens a step</text></svg>')
        return "\n".join(parts)


def _cells(one: Tiers, y: int) -> Iterator[str]:
    for tile, mark in enumerate(one.map):
        if mark not in COLOURS:
            continue
        x, shade = 60 + tile * CELL, COLOURS[PACKED if mark == HOT else mark]
        title = f"<title>tokens {tile * 64} to {tile * 64 + 63}: {NAMES[mark]}</title>"
        yield f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{shade}">{title}</rect>'  # fmt: skip
        if mark == HOT:  # as wide as the share of heads that keep it
            yield f'<rect x="{x}" y="{y}" width="{max(1.0, one.hot[tile] * (CELL - 1)):.1f}" height="{CELL - 1}" fill="{COLOURS[HOT]}"/>'  # fmt: skip


def account(policy: str, layers: list[Any]) -> Account:
    """Of a cache with these layers, as it is now."""
    from .layer import QuantizedLayer  # which needs transformers

    found = {}
    for number, one in enumerate(layers):
        if isinstance(one, QuantizedLayer) and one.is_initialized:
            length = int(one.cumulative_length)
            if length:
                found[number] = tiers(one.view(), length)
    return Account(policy, found)


_LAST: weakref.WeakKeyDictionary[Any, Account] = weakref.WeakKeyDictionary()  # by model


def note(model: Any, cache: Any) -> None:
    """Remember what a model's cache holds, if it is a quantized one: the cache itself goes when the call ends."""
    made = getattr(cache, "account", None)
    if made is not None:
        found = made()
        if found.layers:
            _LAST[model] = found


def last(model: Any) -> Account | None:
    """What `note` was told last about a model."""
    try:
        return _LAST.get(model)
    except TypeError:  # nothing that can be referred to weakly
        return None
