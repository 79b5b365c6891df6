"""A recipe's `weights:` and what was calibrated for them: which layers take which numbers, and what to tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ..rewrite.record import Effective
from ..rewrite.wanted import WantedWeights, settings
from ..spec.recipe import Weight
from . import store
from .grid import Form


def form_of(entry: Weight) -> Form:
    """How an entry of `weights:` wants a layer kept."""
    scheme, group, low, per, *_ = settings(entry)
    return Form(scheme, group, low, per)


def asks(entry: Weight) -> bool:
    """Whether an entry wants calibrated numbers."""
    wanted = entry.rounds is not None or entry.effective_bits is not None
    return packs(entry) and wanted


def packs(entry: Weight) -> bool:
    """Whether an entry has weights rounded; those of a file are already."""
    return entry.scheme not in (None, "stored")


def apply(
    wanted: WantedWeights, owner: nn.Module, extra: Sequence[str | Path] = ()
) -> tuple[list[Effective], bool]:
    """Give layers their calibrated numbers and, under a budget, their form. Returns lines for `effective`, and whether
    all that was asked for is there."""
    lines, complete = [], True
    for entry in {id(e): e for e in wanted.entries.values() if asks(e)}.values():
        layers = [name for name, e in wanted.entries.items() if e is entry]
        name = store.set_name(form_of(entry), entry.effective_bits)
        asked = f"weights: {entry.match}: {_words(entry)}"
        found, why = store.find(owner, name, extra)
        if found is None:
            complete = False
            what = "the nearest numbers"
            if entry.effective_bits is not None:
                what += f", every layer in {form_of(entry).label}"
            lines.append(Effective(asked, what, why))
            continue
        taken = [layer for layer in layers if layer in found.forms]
        for layer in taken:
            wanted.entries[layer] = _as(entry, found.forms[layer])
            wanted.numbers[layer] = store.use(found)
        lines.append(Effective(asked, f"calibrated ({len(taken)} layers)", _made(found, entry)))
        if len(taken) < len(layers):
            complete = False
            left = [layer for layer in layers if layer not in found.forms]
            why = f"{found.path.name} has no {', '.join(left[:3])}"
            lines.append(Effective(asked, f"the nearest numbers ({len(left)} layers)", why))
    return lines, complete


def _as(entry: Weight, form: Form) -> Weight:
    """The entry, in the form that one layer has."""
    per = form.per or None
    group = None if per else form.group or None
    changed = {"scheme": form.scheme, "group": group, "zero_point": form.low, "per": per}
    return entry.model_copy(update=changed)


def _words(entry: Weight) -> str:
    words = [f"{entry.rounds} rounds"] if entry.rounds is not None else []
    if entry.effective_bits is not None:
        words.append(f"effective_bits {entry.effective_bits:g}")
    return ", ".join(words)


def _made(found: store.Set, entry: Weight) -> str:
    made = found.made
    rounds = made.get("rounds", 0)
    short = (
        f", {entry.rounds} asked"
        if entry.rounds and rounds < entry.rounds and not made.get("converged")
        else ""
    )
    return (
        f"{found.path}: {rounds} rounds{short}, {made.get('bits', 0):.2f} bits a weight,"
        f" KL {made.get('kl', 0):.3g} on held calibration text"
    )
