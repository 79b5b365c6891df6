"""Compiled calls on disk: `graphs/KEY/NAME.bin`, a checksum and the bytes it is of.

An entry is written beside its place and renamed, so that two processes never see half of one; what is cut short or
damaged fails its checksum and is no entry. The oldest go when all of them exceed the limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..runtime.cachedir import root
from ..runtime.cachedir import trim as drop_oldest

MAGIC = b"sitsopt graph 1\n"
LIMIT = 1 << 30  # bytes of all entries; SITSOPT_CACHE_LIMIT gives another number


def folder_of(key: str) -> Path:
    """The folder of one model under one set of settings."""
    return root() / "graphs" / key[:40]


def names(folder: Path, first: str) -> Iterator[Path]:
    """The entries of a folder: the one called `first` if it is there, then the others, the latest used first."""
    try:
        found = sorted(folder.glob("*.bin"), key=lambda f: -f.stat().st_mtime)
    except OSError:
        return
    wanted = folder / f"{first}.bin"
    yield from sorted(found, key=lambda f: f != wanted)


def read(path: Path, mark: bool = True) -> bytes | None:
    """The bytes of an entry, None if it is not whole. mark: note that it was used."""
    try:
        data = path.read_bytes()
        if not data.startswith(MAGIC):
            return None
        head = len(MAGIC) + 32
        if hashlib.sha256(data[head:]).digest() != data[len(MAGIC) : head]:
            return None
        if mark:
            with contextlib.suppress(OSError):  # a cache that may only be read
                os.utime(path)
        return data[head:]
    except OSError:
        return None


def write(path: Path, payload: bytes) -> str:
    """Put an entry in its place. Returns why it could not be written, empty if it was."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        trim()
        return ""
    except OSError as error:
        return f"{path.parent}: {error.strerror or error}"
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)


def trim(limit: int | None = None) -> None:
    """Drop the entries that were not used for longest until the rest fits, and what killed writers left."""
    if limit is None:
        limit = int(os.environ.get("SITSOPT_CACHE_LIMIT") or LIMIT)
    drop_oldest((root() / "graphs").glob("*/*"), limit)
