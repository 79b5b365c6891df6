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
USES = "uses"  # a file of the cache: a byte for each look-up


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
    made = _built(_entry(name, text, flags, link), text, flags, link, compiler.path)
    _count(made.cached)
    return made


def is_built(name: str, text: str, flags: list[str], link: list[str]) -> bool:
    """Whether `build` would find it in the cache. Raises BuildError without a compiler."""
    return _sound(_entry(name, text, flags, link))


def _entry(name: str, text: str, flags: list[str], link: list[str]) -> Path:
    compiler = find_compiler()
    parts = [text, *flags, "--", *link, compiler.path, compiler.version, torch.__version__]
    parts += sorted(cpu_flags())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return cache_dir() / f"{name}-{key}.so"


def uses() -> tuple[int, int]:
    """How often a kernel was found in the cache, and how often it was asked for, since the cache was last cleared."""
    try:
        seen = (cache_dir() / USES).read_bytes()
    except OSError:
        return 0, 0
    return seen.count(b"h"), len(seen)


def _count(hit: bool) -> None:
    """One byte a use: appending needs no lock."""
    with contextlib.suppress(OSError), (cache_dir() / USES).open("ab") as stream:
        stream.write(b"h" if hit else b"m")


def _built(entry: Path, text: str, flags: list[str], link: list[str], compiler: str) -> Built:
    if _sound(entry):
        return Built(entry, 0.0, True)
    _make_room(entry.parent)
    with _locked(entry.with_suffix(".lock")):
        if _sound(entry):  # another process was faster
            return Built(entry, 0.0, True)
        started = time.perf_counter()
        _compile(compiler, text, flags, link, entry)
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
