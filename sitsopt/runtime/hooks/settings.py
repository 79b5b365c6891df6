"""The settings that a plan may change: how each is read, and how it is written.

A key is a kind, or a kind and a name: `env:NCCL_ALGO`, `affinity`, `memory-node`, `threads`, `denormals`,
`l2-persist`, `file:/proc/sys/kernel/numa_balancing`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .host import Host


class CannotSet(RuntimeError):
    """A setting that cannot be changed here; the text says why."""


@dataclass(frozen=True)
class Setting:
    """Both raise CannotSet or OSError. A value that was read can be written again."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def setting(key: str, host: Host) -> Setting:
    """The setting of a key. Raises CannotSet for a kind that there is not."""
    kind, _, name = key.partition(":")
    if kind == "env":
        return Setting(lambda: os.environ.get(name), lambda value: _set_variable(name, value))
    if kind == "file":
        return _file(host.path(name))
    if kind in _KINDS:
        return _KINDS[kind]
    raise CannotSet(f"nothing is known of `{key}`")


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = str(value)


def _file(path: Path) -> Setting:
    def write(value: Any) -> None:
        if not path.exists():
            raise CannotSet(f"there is no {path}")
        path.write_text(f"{value}\n")

    return Setting(lambda: path.read_text().strip(), write)


def _affinity() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        raise CannotSet("this system has no affinity to read")
    return sorted(os.sched_getaffinity(0))


def _set_affinity(cpus: list[int]) -> None:
    """Of every thread of the process: pools that exist already move too."""
    _affinity()
    for thread in _threads_of_process():
        try:
            os.sched_setaffinity(thread, cpus)
        except ProcessLookupError:
            continue  # it has just ended
    os.sched_setaffinity(0, cpus)


def _threads_of_process() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return []


def _torch() -> Any:
    if "torch" not in sys.modules:
        raise CannotSet("torch is not loaded")
    return sys.modules["torch"]


def _flushes() -> bool:
    """Whether denormal numbers become zero, tried on one: torch has no way to ask."""
    torch = _torch()
    return bool((torch.full((1,), 1e-40) * 1.0).item() == 0.0)


def _set_denormals(flush: bool) -> None:
    if not _torch().set_flush_denormal(bool(flush)) and flush:
        raise CannotSet("this processor cannot flush denormals")


# numaif.h: modes of a memory policy; numbers of the system calls by machine.
DEFAULT, PREFERRED = 0, 1
CALLS = {
    "x86_64": {"get": 239, "set": 238, "move": 279},
    "aarch64": {"get": 236, "set": 237, "move": 239},
}


def system_call(name: str, *args: Any) -> int:
    """One of the NUMA calls. Raises CannotSet where there is none, OSError when the kernel says no."""
    numbers = CALLS.get(platform.machine())
    if numbers is None or not sys.platform.startswith("linux"):
        raise CannotSet("the NUMA calls of this machine are not known")
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(numbers[name]), *args))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _memory_node() -> int | None:
    """The node that this thread's memory prefers; None for the policy of the system."""
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    system_call("get", ctypes.byref(mode), nodes, ctypes.c_ulong(16 * 64), None, ctypes.c_ulong(0))
    if mode.value != PREFERRED:
        return None
    bits = sum(word << (64 * place) for place, word in enumerate(nodes))
    return bits.bit_length() - 1 if bits else None


def _set_memory_node(node: int | None) -> None:
    if node is None:
        system_call("set", ctypes.c_int(DEFAULT), None, ctypes.c_ulong(0))
        return
    nodes = (ctypes.c_ulong * 16)()
    nodes[node // 64] = 1 << (node % 64)
    system_call("set", ctypes.c_int(PREFERRED), nodes, ctypes.c_ulong(16 * 64))


PERSISTING = 6  # cudaLimitPersistingL2CacheSize


def _runtime() -> Any:
    torch = _torch()
    if not torch.cuda.is_available():
        raise CannotSet("there is no CUDA device")
    return ctypes.CDLL(
        f"libcudart.so.{torch.version.cuda.partition('.')[0]}"
    )  # torch has loaded it


def _persisting() -> int:
    value = ctypes.c_size_t()
    if code := _runtime().cudaDeviceGetLimit(ctypes.byref(value), PERSISTING):
        raise CannotSet(f"cudaDeviceGetLimit: error {code}")
    return value.value


def _set_persisting(size: int) -> None:
    if code := _runtime().cudaDeviceSetLimit(PERSISTING, ctypes.c_size_t(size)):
        raise CannotSet(f"cudaDeviceSetLimit: error {code}")


_KINDS = {
    "affinity": Setting(_affinity, _set_affinity),
    "threads": Setting(
        lambda: _torch().get_num_threads(), lambda n: _torch().set_num_threads(int(n))
    ),
    "denormals": Setting(_flushes, _set_denormals),
    "memory-node": Setting(_memory_node, _set_memory_node),
    "l2-persist": Setting(_persisting, _set_persisting),
}
