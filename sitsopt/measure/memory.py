"""Memory of this process, now and at its highest."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil


def rss_mb() -> float:
    """Resident memory now, in MB (10^6 bytes)."""
    return psutil.Process().memory_info().rss / 1e6


def peak_mb() -> float:
    """The highest resident memory since the process began, in MB."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
