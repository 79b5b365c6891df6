"""What a calibration has reached, on disk: written whole or not at all, read only for the same job."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..graph.packed import FP8
from .grid import Fit, Form


@dataclass
class Round:
    """How far the whole model was from itself after a round; how far each layer's output, on what it had read."""

    number: int
    how: str
    kl: float
    mae: dict[str, float] = field(default_factory=dict)  # over the mean size of the output
    mse: dict[str, float] = field(default_factory=dict)  # over its mean square

    @property
    def mean_mae(self) -> float:
        return sum(self.mae.values()) / max(1, len(self.mae))


@dataclass
class Progress:
    """The state between rounds; what is on disk."""

    fits: dict[str, Fit] = field(default_factory=dict)
    best: dict[str, Fit] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)


def save(path: Path, key: str, progress: Progress) -> None:
    """Write the state beside itself and put it in place."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, fit in progress.fits.items():
        kind = FP8 if fit.form.scheme == "fp8" else torch.int8
        tensors[f"{name}|numbers"] = fit.numbers.to(kind)
        for label, one in (("now", fit), ("best", progress.best.get(name))):
            if one is not None:
                tensors |= {
                    f"{name}|{label}.scale": one.scale.clone(),
                    f"{name}|{label}.low": one.low.clone(),
                }
    notes = {
        "key": key,
        "forms": {n: asdict(f.form) for n, f in progress.fits.items()},
        "inputs": {n: f.k for n, f in progress.fits.items()},
        "rounds": [asdict(r) for r in progress.rounds],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, part, {"sitsopt": json.dumps(notes)})
        Path(part).replace(path)
    finally:
        Path(part).unlink(missing_ok=True)


def load(path: Path, key: str) -> Progress | None:
    """The state for this very job; None where there is none, or none that can be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            notes = json.loads((file.metadata() or {})["sitsopt"])
            if notes["key"] != key:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        forms = {n: Form(**f) for n, f in notes["forms"].items()}
        rounds = [Round(**r) for r in notes["rounds"]]
        now, best = (_fits(tensors, forms, notes["inputs"], label) for label in ("now", "best"))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None
    return Progress(now, best, rounds)


def _fits(
    tensors: Mapping[str, Tensor], forms: Mapping[str, Form], inputs: Mapping[str, int], label: str
) -> dict[str, Fit]:
    return {
        n: Fit(
            form, inputs[n], tensors[f"{n}|numbers"].float(), tensors[f"{n}|{label}.scale"],
            tensors[f"{n}|{label}.low"],
        )
        for n, form in forms.items()
        if f"{n}|{label}.scale" in tensors
    }  # fmt: skip
