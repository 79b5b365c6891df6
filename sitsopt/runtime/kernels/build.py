"""C++ text to a shared object, once per machine: the on-disk cache.

An entry is `NAME-KEY.so` beside `NAME-KEY.json`, which holds the object's checksum and is written last:
an entry without it, or with another checksum, was cut short or damaged and is built again. A file lock keeps
two processes from building the same entry; the kernel drops it when its holder dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..cachedir import root
from .toolchain import BuildError, cpu_flags, find_compiler

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock, renames still keep entries whole
    fcntl = None  # type: ignore[assignment]

LIMIT_S = 600


@dataclass(frozen=True)
class Built:
    """A shared object that is ready to load. seconds: what its compilation took, 0.0 from the cache."""

    path: Path
    seconds: float
    cached: bool


def cache_dir() -> Path:
    """The part of the cache folder for kernels."""
    return root() / "kernels"


def build(name: str, text: str, flags: list[str], link: list[str]) -> Built:
    """The object for `text`, from the cache or compiled now. Raises BuildError with the compiler's words."""
    compiler = find_compiler()
    parts = [text, *flags, "--", *link, compiler.path, compiler.version, torch.__version__]
    parts += sorted(cpu_flags())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    entry = cache_dir() / f"{name}-{key}.so"
    if _sound(entry):
        return Built(entry, 0.0, True)
    _make_room(entry.parent)
    with _locked(entry.with_suffix(".lock")):
        if _sound(entry):  # another process was faster
            return Built(entry, 0.0, True)
        started = time.perf_counter()
        _compile(compiler.path, text, flags, link, entry)
        return Built(entry, time.perf_counter() - started, False)


def _make_room(folder: Path) -> None:
    """Makes the folder, tries to write in it, and drops what killed builds left behind."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BuildError(
            f"the kernel cache {folder} cannot be written ({error}); SITSOPT_CACHE names another folder"
        ) from error
    for left in folder.glob(".build-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 2 * LIMIT_S:
                shutil.rmtree(left, ignore_errors=True)


def _sound(entry: Path) -> bool:
    try:
        noted = json.loads(entry.with_suffix(".json").read_text())["sha256"]
        return noted == _checksum(entry)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, text: str, flags: list[str], link: list[str], entry: Path) -> None:
    """Compiles beside the entry and renames, the checksum last."""
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".build-") as scratch:
        source, made = Path(scratch, "kernel.cpp"), Path(scratch, "kernel.so")
        source.write_text(text)
        objects = _run([compiler, *flags, "-c", str(source), "-o", str(made.with_suffix(".o"))])
        _run([compiler, "-shared", str(made.with_suffix(".o")), *link, "-o", str(made)])
        note = {
            "sha256": _checksum(made),
            "command": shlex.join(objects),
            "torch": torch.__version__,
        }
        os.replace(made, entry)
        side = Path(scratch, "kernel.json")
        side.write_text(json.dumps(note))
        os.replace(side, entry.with_suffix(".json"))


def _run(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler could not be run: {error}") from error
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise BuildError(f"{Path(command[0]).name} failed: {words[0].strip()[:300]}")
    return command
