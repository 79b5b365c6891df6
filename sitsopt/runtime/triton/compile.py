"""Kernels compiled to machine code for any target, on a machine without a GPU.

Child processes do it: a compiler that crashes is an error of one kernel, and whatever state this process's own
triton is in does not matter. Results are kept by text, triton version and architecture.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sitsopt.emit.triton.source import Source

from .module import cache_dir, digest, write_whole

_ROOT = str(Path(__file__).resolve().parents[3])
Key = tuple[str, int | str, int]


@dataclass(frozen=True)
class Facts:
    """What one compiled kernel asks of the hardware. spills: bytes a thread keeps in local memory."""

    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    threads: int = 0
    error: str = ""
    code: str = ""


def compile_all(
    sources: Sequence[Source],
    target: Key,
    jobs: int = 0,
    done: Callable[[int, Facts], None] = lambda at, facts: None,
) -> list[Facts]:
    """The facts of each source, in order. target: as `GPUTarget` takes it. done: called after each."""
    results: list[Facts] = [Facts() for _ in sources]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for at, source in enumerate(sources):
        held = _held(source, target)
        if held is None:
            waiting.put(at)
        else:
            results[at] = held
            done(at, held)

    def work() -> None:
        child = _Child()
        try:
            while True:
                at = waiting.get_nowait()
                results[at] = child.compile(sources[at], target)
                _keep(sources[at], target, results[at])
                done(at, results[at])
        except queue.Empty:
            return
        finally:
            child.close()

    workers = min(jobs or os.cpu_count() or 1, waiting.qsize())
    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def code(source: Source, target: Key, kind: str) -> Facts:
    """One kernel with its code: kind is `ptx`, `sass`, `ttir`, `ttgir`, `llir` or `amdgcn`."""
    child = _Child()
    try:
        return child.compile(source, target, kind)
    finally:
        child.close()


class _Child:
    """One compiler process, started again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def compile(self, source: Source, target: Key, show: str = "") -> Facts:
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(_job(source, target, show)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = process.wait()
            self._process = None
            return Facts(error=f"the compiler process ended with {code}")
        return Facts(**json.loads(line))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            env["PYTHONPATH"] = os.pathsep.join(p for p in (_ROOT, env.get("PYTHONPATH", "")) if p)
            env["TRITON_DEFAULT_FP_FUSION"] = "1"
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sitsopt.runtime.triton.compiler_child"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=env, text=True,
            )  # fmt: skip
        return self._process


def _job(source: Source, target: Key, show: str) -> dict[str, Any]:
    return {
        "text": source.text,
        "name": source.name,
        "params": [(p.name, p.type, p.aligned) for p in source.params],
        "constants": dict(source.constants),
        "warps": source.warps,
        "stages": source.stages,
        "target": target,
        "show": show,
    }


def _entry(source: Source, target: Key) -> Path:
    key = digest(json.dumps(_job(source, target, "")), importlib.metadata.version("triton"))
    return cache_dir() / "facts" / f"{source.name}-{key}.json"


def _held(source: Source, target: Key) -> Facts | None:
    try:
        return Facts(**json.loads(_entry(source, target).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _keep(source: Source, target: Key, facts: Facts) -> None:
    if not facts.error.startswith("the compiler process"):
        write_whole(_entry(source, target), json.dumps(asdict(facts)))
