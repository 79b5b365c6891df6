"""Where sitsopt keeps what it can make again: kernels, compiled graphs, unpacked models, measurements."""

from __future__ import annotations

import os
from pathlib import Path


def root() -> Path:
    """$SITSOPT_CACHE, else sitsopt inside $XDG_CACHE_HOME, else ~/.cache/sitsopt. It may not exist yet."""
    asked = os.environ.get("SITSOPT_CACHE")
    if asked:
        return Path(asked).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sitsopt"
