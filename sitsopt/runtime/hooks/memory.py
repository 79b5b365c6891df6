"""How much memory is left, and the signs that it will not last."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WINDOW_S = 60.0  # failures are counted a minute
CALLS_LEFT = 16  # calls for which memory must last as it is taken now
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class Thresholds:
    """From which values on a guard steps down; None is not watched. `failures` a minute; `fragmentation` a share of
    what the allocator holds; `faults` major page faults a second; `headroom_mb` always kept free."""

    failures: float = 3.0
    fragmentation: float | None = None
    faults: float | None = None
    headroom_mb: float = 0.0


@dataclass(frozen=True)
class Reading:
    """What was seen at one moment; None is unknown. `free` is what the nearest limit leaves, `used` what this process
    takes of it, `limit` which one it is."""

    at: float
    free: int | None = None
    used: int | None = None
    limit: str = ""
    fragmentation: float | None = None
    retries: int | None = None
    faults: int | None = None


def read(now: Callable[[], float] = time.monotonic) -> Reading:
    """Look at this process: a few tens of microseconds."""
    retries, fragmentation = _cuda()
    if fragmentation is None:
        fragmentation = heap_fragmentation()
    virtual, resident = _used()
    left = [
        (free, used, limit)
        for free, used, limit in (
            (_address_space(virtual), virtual, "address space"),
            (_machine(), resident, "machine"),
        )
        if free is not None
    ]
    free, used, limit = min(left, key=lambda each: each[0]) if left else (None, None, "")
    return Reading(now(), free, used, limit, fragmentation, retries, _faults())


def _used() -> tuple[int | None, int | None]:
    """Address space and resident memory of this process, in bytes."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
        return int(pages[0]) * PAGE, int(pages[1]) * PAGE
    except (OSError, ValueError):
        return None, None


def _address_space(used: int | None) -> int | None:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY or used is None else limit - used
    except (ImportError, OSError, ValueError):
        return None


def _machine() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    try:
        import psutil

        return int(psutil.virtual_memory().available)
    except (ImportError, OSError):
        return None


def _cuda() -> tuple[int | None, float | None]:
    """Retried and failed allocations so far, and the share of reserved memory in pieces that nothing uses."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, None
    stats = torch.cuda.memory_stats()
    held = stats.get("reserved_bytes.all.current", 0)
    split = stats.get("inactive_split_bytes.all.current", 0)
    retries = stats.get("num_alloc_retries", 0) + stats.get("num_ooms", 0)
    return retries, split / held if held else 0.0


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
        "keepcost")]  # fmt: skip


def heap_fragmentation() -> float | None:
    """The share of the C library's heap that is free and cannot be given back from its end."""
    call = getattr(_libc(), "mallinfo2", None)
    if call is None:
        return None
    call.restype = _Heap
    heap = call()
    held = heap.arena + heap.hblkhd
    return (heap.fordblks - heap.keepcost) / held if held else 0.0


def trim() -> bool:
    """Ask the C library to give free memory back; whether it gave any."""
    call = getattr(_libc(), "malloc_trim", None)
    return bool(call and call(0))


def _libc() -> Any:
    return ctypes.CDLL(None) if os.name == "posix" else None


def _faults() -> int | None:
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    except ImportError:
        return None


@dataclass
class Trend:
    """Readings of one process over time."""

    thresholds: Thresholds
    failures: deque[float] = field(default_factory=deque)
    last: Reading | None = None
    grows: float | None = None  # bytes a call, smoothed

    def failed(self, at: float) -> None:
        """Note a failed allocation."""
        self.failures.append(at)

    def sign(self, reading: Reading) -> str:
        """Which sign of memory running out a reading shows, in words; nothing when there is none."""
        before, self.last = self.last, reading
        self._count(before, reading)
        limits = self.thresholds
        if len(self.failures) >= limits.failures:
            return f"{len(self.failures)} failed or retried allocations within a minute"
        if limits.fragmentation is not None and (reading.fragmentation or 0) > limits.fragmentation:
            return f"fragmentation {reading.fragmentation:.1%} is over {limits.fragmentation:.1%}"
        if (
            before is not None
            and limits.faults is not None
            and self._fault_rate(before, reading) > limits.faults
        ):
            return f"more than {limits.faults:g} major page faults a second"
        return self._running_out(before, reading)

    def _count(self, before: Reading | None, reading: Reading) -> None:
        if before is not None and before.retries is not None and reading.retries is not None:
            self.failures.extend([reading.at] * (reading.retries - before.retries))
        while self.failures and reading.at - self.failures[0] > WINDOW_S:
            self.failures.popleft()

    def _fault_rate(self, before: Reading, reading: Reading) -> float:
        if before.faults is None or reading.faults is None or reading.at <= before.at:
            return 0.0
        return (reading.faults - before.faults) / (reading.at - before.at)

    def _running_out(self, before: Reading | None, reading: Reading) -> str:
        if reading.free is None:
            return ""
        if reading.free < self.thresholds.headroom_mb * (1 << 20):
            return f"{reading.free >> 20} MB are left, {self.thresholds.headroom_mb:g} are to stay free"
        if before is None or before.limit != reading.limit or None in (before.used, reading.used):
            return ""
        grown = max(0, (reading.used or 0) - (before.used or 0))
        self.grows = grown if self.grows is None else 0.75 * self.grows + 0.25 * grown
        if self.grows > 0 and reading.free < CALLS_LEFT * self.grows:
            return f"{reading.free >> 20} MB are left, and a call takes {self.grows / (1 << 20):.1f} MB"
        return ""

    def forget(self) -> None:
        """After a step down: what was seen before it says nothing any more."""
        self.failures.clear()
        self.last, self.grows = None, None
