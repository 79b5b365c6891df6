"""Packed weights on disk: a warm start maps them into memory instead of rounding every weight again.

    <cache>/packed/<digest of a weight, of its settings and of the layout>.safetensors

Files are found by the contents they were made from, so a changed weight is a miss. Each tensor begins at a line of
memory, as kernels want it, and is used where the file is mapped. The files used longest ago go first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..graph import kept
from ..graph.packed import Layout, error_of, note_error, pack
from .cachedir import root, trim

log = logging.getLogger("sitsopt")
FOLDER = "packed"
LINE = 64
SMALLEST = 1 << 16  # numbers: fewer are packed sooner than found
LIMIT = 8 << 30  # bytes of all files
SPARE = 2 << 30  # bytes that stay free on the disk


def write(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """A safetensors file of uint8 tensors, in place whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.")
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in _pieces(tensors, notes):
                file.write(piece)
        Path(part).replace(path)
    finally:
        Path(part).unlink(missing_ok=True)


def _pieces(
    tensors: Mapping[str, Tensor], notes: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The file piece by piece. The format knows no gaps: what fills a line up is a tensor too."""
    head: dict[str, object] = {"__metadata__": dict(notes)}
    data: list[bytes | memoryview] = []
    at = 0

    def add(name: str, shape: list[int], piece: bytes | memoryview) -> None:
        nonlocal at
        head[name] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + len(piece)]}
        data.append(piece)
        at += len(piece)

    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu", torch.uint8).contiguous()
        add(name, list(plain.shape), plain.view(-1).numpy().data)
        if at % LINE:
            add(f"{FILL}{len(data)}", [-at % LINE], bytes(-at % LINE))
    text = json.dumps(head).encode()
    text += b" " * (-(8 + len(text)) % LINE)
    yield struct.pack("<Q", len(text)) + text
    yield from data


FILL = "fill."


def _keep(weight: Tensor, settings: kept.Settings, make: Callable[[], Tensor]) -> Tensor:
    if weight.numel() < SMALLEST or weight.device.type != "cpu":
        return make()
    path = root() / FOLDER / f"{_key(weight, settings)}.safetensors"
    found = _read(path)
    if found is None:
        found = make()
        _save(path, found)
    return found


def _key(weight: Tensor, settings: kept.Settings) -> str:
    plain = weight.detach().contiguous().view(-1).view(torch.uint8)
    digest = hashlib.blake2b(plain.numpy().data, digest_size=16)
    facts = (list(weight.shape), str(weight.dtype), settings, layout_digest())
    digest.update(repr(facts).encode())
    return digest.hexdigest()


def _read(path: Path) -> Tensor | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            error = float((file.metadata() or {})["error"])
            found: Tensor = file.get_tensor(FOLDER)
        note_error(found, error)
        with contextlib.suppress(OSError):  # a cache that may only be read
            os.utime(path)
        return found
    except (SafetensorError, OSError, KeyError, ValueError):
        return None


def _save(path: Path, packed: Tensor) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < SPARE + packed.nbytes:
            return
        write(path, {FOLDER: packed}, {"error": repr(error_of(packed) or 0.0)})
        trim(path.parent.iterdir(), LIMIT)
    except OSError as error:
        log.info("a packed weight is not kept on disk: %s", error)


@functools.cache
def layout_digest() -> str:
    """What the bytes of packed weights mean: a change of layout makes every file unreadable, and none is misread."""
    example = torch.linspace(-1, 1, 32 * 128).view(32, 128).sin()
    kinds = [("int4", 64, True, ""), ("int4", 32, False, ""), ("int8", 0, False, "")]
    kinds += [("int8", 64, True, ""), ("fp8", 0, False, "row"), ("fp8", 128, False, "block")]
    total = hashlib.sha256()
    for scheme, group, low, per in kinds:
        total.update(pack(example, scheme, group, low, per).numpy().tobytes())
        total.update(repr(Layout(scheme, group, low)).encode())
    return total.hexdigest()[:16]


kept.register(_keep)
