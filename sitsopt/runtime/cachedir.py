"""Where sitsopt keeps what it can make again: kernels, compiled graphs, unpacked models, measurements."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def root() -> Path:
    """$SITSOPT_CACHE, else sitsopt inside $XDG_CACHE_HOME, else ~/.cache/sitsopt. It may not exist yet."""
    asked = os.environ.get("SITSOPT_CACHE")
    if asked:
        return Path(asked).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sitsopt"


def trim(files: Iterable[Path], limit: int) -> None:
    """Drop the files that were not used for longest until the rest has at most `limit` bytes."""
    found = []
    for path in files:
        with contextlib.suppress(OSError):
            facts = path.stat()
            found.append((facts.st_mtime, facts.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size
