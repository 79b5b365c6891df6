"""Weights that a file already holds rounded, beside the parameters that hold the same values plain.

A loader says where a model came from (`comes_from`); the file is opened once a recipe wants `scheme: stored`.
`pack` then lays the file's own numbers out, and rounds again only where a parameter has changed since.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from . import packed as plain
from .packed import Layout, Rounded

STORED = "stored"  # what `per` says of a weight whose numbers come from a file
MOST = {"int4": 15, "int8": 128, "fp8": plain.FP8_MOST}  # the largest numbers
SAMPLE = 8  # rows compared when a file is opened

log = logging.getLogger("sitsopt")


@dataclass(eq=False)
class Archived:
    """A weight [N, K] in a file. read(start, stop): these rows as `packed.Rounded`; source: file, name and format."""

    layout: Layout
    shape: tuple[int, int]
    read: Callable[[int, int], Rounded]
    source: str
    exact: bool = True  # whether the form has the very scales of the file
    seen: tuple[object, ...] = ()

    def values(self, start: int, stop: int) -> Tensor:
        """What rows stand for: f32 [stop - start, K]."""
        return plain.values(self.read(start, stop), self.layout, self.shape[1])


# By the parameter's name: the weight, or why the file has none that can be taken as it is.
Archive = Mapping[str, Archived | str]
Opener = Callable[[nn.Module], Archive]

_OPENERS: weakref.WeakKeyDictionary[nn.Module, Opener] = weakref.WeakKeyDictionary()
_OPENED: weakref.WeakKeyDictionary[nn.Module, Archive] = weakref.WeakKeyDictionary()
_WEIGHTS = WeakTensorKeyDictionary()


def comes_from(model: nn.Module, opener: Opener) -> None:
    """Say which file a model's weights are from. `opener` is called where these are wanted, once."""
    _OPENERS[model] = opener
    _OPENED.pop(model, None)


def open_for(model: nn.Module) -> Archive | None:
    """The file's weights by the parameters' names, each compared in a few rows with its parameter; None where no
    file is known."""
    if model in _OPENED:
        return _OPENED[model]
    opener = _OPENERS.get(model)
    if opener is None:
        return None
    params = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Archived | str] = {}
    for name, entry in opener(model).items():
        weight = params.get(name)
        if weight is not None:
            found[name] = entry if isinstance(entry, str) else _attach(weight, entry)
    _OPENED[model] = found
    return found


def _attach(weight: Tensor, entry: Archived) -> Archived | str:
    if tuple(weight.shape) != entry.shape:
        return f"{entry.source} is {list(entry.shape)}, the parameter {list(weight.shape)}"
    rows = entry.shape[0]
    sample = sorted({i * (rows - 1) // (SAMPLE - 1) for i in range(SAMPLE)})
    if not weight.is_meta and not all(_agree(weight, entry, i, i + 1) for i in sample):
        return f"{entry.source} holds other values than the parameter"
    entry.seen = _stamp(weight)
    _WEIGHTS[weight] = entry
    return entry


def archived_of(weight: Tensor) -> Archived | None:
    """What a file holds for a parameter."""
    found: Archived | None = _WEIGHTS.get(weight)
    return found


def current(weight: Tensor) -> Archived | None:
    """The same, unless the parameter has other values by now."""
    found = archived_of(weight)
    if found is None or weight.is_meta or found.seen == _stamp(weight):
        return found
    step = _rows_at_once(found)
    if all(_agree(weight, found, i, i + step) for i in range(0, found.shape[0], step)):
        found.seen = _stamp(weight)
        return found
    log.warning("a weight has changed since it was read from %s: rounded again", found.source)
    del _WEIGHTS[weight]
    return None


def pack(weight: Tensor, scheme: str, group: int, low: bool) -> Tensor:
    """As `packed.pack`, with the numbers of the file where the parameter [N, K] still stands for these."""
    found, layout = current(weight), Layout(scheme, group, low)
    if found is None or found.layout != layout:
        return plain.pack(weight, scheme, group, low, _per(layout))
    step = _rows_at_once(found)
    parts = [
        plain.lay_out(found.read(i, min(i + step, found.shape[0])), layout)
        for i in range(0, found.shape[0], step)
    ]
    packed = torch.cat(parts)
    plain.note_error(packed, 0.0)
    return packed


def nearest(weight: Tensor, scheme: str, group: int, low: bool) -> Tensor:
    """As `packed.nearest`, from the file."""
    found, layout = current(weight), Layout(scheme, group, low)
    if found is None or found.layout != layout:
        return plain.nearest(weight, scheme, group, low, _per(layout))
    return found.values(0, found.shape[0]).to(weight.dtype)


def _per(layout: Layout) -> str:
    """What shares a scale once a changed weight is rounded."""
    return "" if layout.scheme != "fp8" else "block" if layout.group else "row"


def _rows_at_once(entry: Archived) -> int:
    return int(max(128, plain.CHUNK // max(1, entry.shape[1]) // 128 * 128))


def _agree(weight: Tensor, entry: Archived, start: int, stop: int) -> bool:
    """Whether rows stand for what the parameter holds, within its dtype's rounding and that of an f16 scale."""
    mine = weight[start:stop].detach().to("cpu", torch.float32)
    rounded = entry.read(start, min(stop, entry.shape[0]))
    file = plain.values(rounded, entry.layout, entry.shape[1])
    slack = torch.maximum(mine.abs(), file.abs()) * torch.finfo(weight.dtype).eps
    slack += torch.finfo(weight.dtype).tiny
    if rounded.scale is not None and not entry.exact:
        most = rounded.scale.float().abs() * MOST[entry.layout.scheme]
        most = most if rounded.low is None else most + rounded.low.float().abs()
        most = (most * rounded.factor[:, None]).repeat_interleave(entry.layout.width, 1)
        slack += most[:, : entry.shape[1]] * 2.0**-11
    return bool(((mine - file).abs() <= slack).all())


def _stamp(weight: Tensor) -> tuple[object, ...]:
    """Version, address and sixteen values."""
    if weight.is_meta:
        return ()
    version = 0 if weight.is_inference() else weight._version
    flat = weight.detach().view(-1) if weight.is_contiguous() else weight.detach().reshape(-1)
    at = torch.linspace(0, flat.numel() - 1, 16, dtype=torch.float64).long()
    return version, weight.data_ptr(), tuple(flat[at.to(flat.device)].tolist())
