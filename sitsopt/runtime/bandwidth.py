"""How fast this machine reads memory: a probe of half a second, whose answer is kept.

The probe sums 256 MiB of integers, one slice a core, several times over, and takes the best time. That is
the speed of a simple vectorised read loop on all cores that the process may use, which is what a
memory-bound kernel can hope for; it is not the peak of the memory modules. On a machine whose last cache
holds the buffer it measures the cache. Other programs that run meanwhile make the answer too low.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .cachedir import root

log = logging.getLogger(__name__)

BUFFER_BYTES = 256 * 1024 * 1024
BUDGET_S = 0.25  # for the reads; filling the buffer comes on top
_VERSION = 1


def read_bandwidth_gbs(cached: bool = True, measure: bool = True) -> float | None:
    """Read bandwidth in 10^9 bytes a second over all cores of this process, or None when it is unknown.

    A kept answer is used unless `cached` is false; without one the probe runs, unless `measure` is
    false. Answers are kept a machine (host, processor, cores) in the cache folder.
    """
    file = root() / f"bandwidth-{_machine_key()}.json"
    kept = _kept(file) if cached else None
    if kept is not None or not measure:
        return kept
    try:
        measured = probe()
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        log.info("the read bandwidth could not be measured: %s", error)
        return None
    best = max(measured, _kept(file) or 0.0)  # other programs can only slow a probe down
    _keep(file, best)
    return best if cached else measured


def probe(buffer_bytes: int = BUFFER_BYTES, budget_s: float = BUDGET_S) -> float:
    """Measure now: 10^9 bytes read a second, the best of the passes that fit into `budget_s` seconds."""
    import numpy as np  # its sum is a plain vectorised loop; torch's integer sum is half as fast

    cores = len(_cpus())
    slices = np.array_split(np.empty(buffer_bytes // 8, dtype=np.int64), cores)
    best, passes = float("inf"), 0
    with ThreadPoolExecutor(cores) as pool:  # numpy lets go of the interpreter lock meanwhile
        list(pool.map(lambda part: part.fill(1), slices))  # pages exist from here on
        start = time.perf_counter()
        while passes < 2 or time.perf_counter() - start < budget_s:
            begin = time.perf_counter()
            list(pool.map(np.sum, slices))
            best, passes = min(best, time.perf_counter() - begin), passes + 1
    return round(sum(part.nbytes for part in slices) / best / 1e9, 2)


def _cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _machine_key() -> str:
    parts = [_VERSION, platform.node(), platform.machine(), _cpu_model(), _cpus(), BUFFER_BYTES]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), "")


def _kept(file: Path) -> float | None:
    try:
        value = json.loads(file.read_text())["read_gbs"]
        return float(value) if 0 < float(value) < 1e6 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(file: Path, value: float) -> None:
    """Written beside and moved into place, so that a second process never reads half a file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as stream:
            json.dump({"read_gbs": value}, stream)
        os.replace(stream.name, file)
    except OSError as error:
        log.info("the read bandwidth could not be kept: %s", error)
