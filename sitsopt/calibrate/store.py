"""Calibrated weights on disk: one folder a model, one file a set of numbers, found again by the weights' own values.

    <home>/calibrated/<class>-<shapes>-<weights>/<set>.safetensors    packed weights by layer, and how they were made

A home is a folder of the search path (where `recipes/` lies too), or the cache folder. A set is named by the form of
its layers (`int4-g64-low`), with `@4.75` behind it for a budget of bits.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..graph import calibrated
from ..rewrite.wanted import is_linear
from ..runtime import packed_files
from ..runtime.cachedir import root
from ..runtime.packed_files import FILL, LINE, layout_digest
from ..spec.locate import search_path
from .grid import Form

FOLDER = "calibrated"


@dataclass(frozen=True)
class Set:
    """One file: the form of each layer, the print of the weight it was made from, and how it was made."""

    path: Path
    forms: dict[str, Form]
    prints: dict[str, str]
    made: dict[str, Any]

    @property
    def name(self) -> str:
        """What stands in graphs: the set and the digest of its file."""
        return f"{self.path.stem}/{_digest(self.path, self.path.stat().st_mtime_ns)}"


def set_name(form: Form, budget: float | None = None) -> str:
    """The set that an entry of a recipe asks for."""
    return form.label + (f"@{budget:g}" if budget is not None else "")


def plain(module: nn.Module) -> Tensor:
    """A layer's weight as [N, K]."""
    weight: Any = module.weight
    return weight.detach() if isinstance(module, nn.Linear) else weight.detach().t()


def prints_of(model: nn.Module) -> dict[str, str]:
    """The fingerprint of every linear layer's weight."""
    return {n: calibrated.fingerprint(plain(m)) for n, m in model.named_modules() if is_linear(m)}


def model_keys(model: nn.Module, prints: Mapping[str, str]) -> tuple[str, str]:
    """(class and shapes, weights) of a model, which name its folder."""
    shapes = [(n, *plain(m).shape) for n, m in model.named_modules() if is_linear(m)]
    of_shapes = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    of_weights = hashlib.sha256(repr(sorted(prints.items())).encode()).hexdigest()[:8]
    return f"{type(model).__name__}-{of_shapes}", of_weights


def homes(extra: Sequence[str | Path] = ()) -> list[Path]:
    """Where to look, in order."""
    return [*(folder / FOLDER for folder in search_path(extra)), root() / FOLDER]


def find(model: nn.Module, name: str, extra: Sequence[str | Path] = ()) -> tuple[Set | None, str]:
    """The set called `name` for the model's weights as they are now, else why there is none."""
    if any(p.device.type == "meta" for p in model.parameters()):
        return None, "the model has no weights"
    prints = prints_of(model)
    kind, weights = model_keys(model, prints)
    stale = False
    for home in homes(extra):
        path = home / f"{kind}-{weights}" / f"{name}.safetensors"
        if path.is_file():
            found = read(path)
            if found is None:
                return None, f"{path} is damaged, or of another version: calibrate again"
            if all(prints.get(n) == p for n, p in found.prints.items()):
                return found, ""
        stale = stale or any(home.glob(f"{kind}-*/{name}.safetensors"))
    if stale:
        return None, f"{name} was calibrated for other weights of this model: calibrate again"
    return None, f"{name} is not calibrated: `sitsopt calibrate` makes it"


def read(path: Path) -> Set | None:
    """A set without its weights; None for a file that is not whole or that this version cannot read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            notes = json.loads((file.metadata() or {})["sitsopt"])
            names = {n for n in file.keys() if not n.startswith(FILL)}  # noqa: SIM118
        forms = {n: Form(**form) for n, form in notes["forms"].items()}
        if names != set(forms) or notes["layout"] != layout_digest():
            return None
        return Set(path, forms, notes["prints"], notes["made"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None


def write(
    folder: Path,
    name: str,
    packed: Mapping[str, Tensor],
    forms: Mapping[str, Form],
    prints: Mapping[str, str],
    made: Mapping[str, Any],
) -> Path:
    """Put a set in its folder: the file is whole or not there."""
    target = folder / f"{name}.safetensors"
    notes = {
        "layout": layout_digest(),
        "forms": {n: asdict(f) for n, f in forms.items()},
        "prints": {n: prints[n] for n in forms},
        "made": dict(made),
    }
    packed_files.write(target, packed, {"sitsopt": json.dumps(notes)})
    return target


@functools.cache
def _digest(path: Path, changed: int) -> str:
    """Of a file's list of contents and the time it was written."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        head = file.read(size)
    return hashlib.sha256(head + str(changed).encode()).hexdigest()[:12]


_USED: dict[str, Set] = {}


def use(found: Set) -> str:
    """Let packing find a set's weights; returns the name for the graph."""
    _USED[found.name] = found
    return found.name


def _reader(name: str, weight: Tensor) -> Tensor | None:
    from safetensors import safe_open

    found = _USED.get(name)
    if found is None:
        return None
    wanted = calibrated.fingerprint(weight)
    layer = next((n for n, p in found.prints.items() if p == wanted), None)
    if layer is None:
        return None
    with safe_open(found.path, "pt") as file:
        return at_lines(file.get_tensor(layer))


def at_lines(packed: Tensor) -> Tensor:
    """The tensor itself where it begins at a line of memory, as kernels want it, else a copy."""
    return packed if packed.data_ptr() % LINE == 0 else packed.clone()


calibrated.register(_reader)
