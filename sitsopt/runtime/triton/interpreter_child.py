"""The child of `interpreter`: reads launches from stdin, runs them, writes changed storages to stdout."""

from __future__ import annotations

import os
import pickle
import struct
import sys
import traceback
import warnings
from typing import Any, BinaryIO

import torch

from .interpreter_bf16 import repair
from .module import load


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """One launch after another, until stdin ends."""
    while len(head := source.read(8)) == 8:
        job = pickle.loads(source.read(struct.unpack("<q", head)[0]))
        try:
            answer: Any = run(*job)
        except Exception:
            answer = traceback.format_exc()
        message = pickle.dumps(answer, protocol=5)
        sink.write(struct.pack("<q", len(message)) + message)
        sink.flush()


def run(
    text: str,
    name: str,
    constants: dict[str, int],
    grid: tuple[int, ...],
    packed: list[Any],
    raw: dict[int, bytes | str],
) -> dict[int, bytes]:
    """One launch; returns the bytes of every storage afterwards."""
    held = {key: _received(data) for key, data in raw.items()}
    args = [_unpack(arg, held) for arg in packed]
    kernel = load(text, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy on inf and NaN
        kernel[grid](*args, **constants)
    own = {key: len(data) for key, data in raw.items() if isinstance(data, bytes)}
    return {key: held[key].numpy().tobytes()[:size] for key, size in own.items()}


def _received(data: bytes | str) -> torch.Tensor:
    if isinstance(data, bytes):
        return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    return torch.from_file(data, shared=True, size=os.path.getsize(data), dtype=torch.uint8)


def _unpack(arg: Any, held: dict[int, torch.Tensor]) -> Any:
    if not isinstance(arg, tuple):
        return arg
    _, key, dtype, shape, stride, offset = arg
    whole = torch.tensor([], dtype=getattr(torch, dtype)).set_(held[key].untyped_storage())
    return whole.as_strided(shape, stride, offset)


if __name__ == "__main__":
    repair()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints must not stand between answers
    serve(sys.stdin.buffer, out)
