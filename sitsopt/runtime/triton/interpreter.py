"""Kernels run by Triton's interpreter, in a process of its own.

The interpreter is chosen when triton is imported and changes it for the whole process, so it lives in a child
that serves one launch after another. Tensors go there and back as the bytes of their storages: aliasing and
strides survive.
"""

from __future__ import annotations

import atexit
import os
import pickle
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from sitsopt.emit.triton.source import Source

_ROOT = str(Path(__file__).resolve().parents[3])


class InterpreterError(RuntimeError):
    """The kernel failed in the interpreter; the message is the child's own traceback."""


class Interpreter:
    """One child process; `run` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, source: Source, grid: tuple[int, ...], args: list[Any]) -> None:
        """Runs every program of the grid; the tensors among `args` are written in place.

        args: one value a parameter of the source, in order.
        """
        if len(args) != len(source.params):
            raise TypeError(f"{source.name} takes {len(source.params)} arguments, not {len(args)}")
        if 0 in grid:
            return
        storages: dict[int, torch.UntypedStorage] = {}
        packed = [_pack(arg, storages) for arg in args]
        raw = {key: _sent(storage) for key, storage in storages.items()}
        job = (source.text, source.name, dict(source.constants), grid, packed, raw)
        with self._lock:
            answer = self._ask(pickle.dumps(job, protocol=5))
        if isinstance(answer, str):
            raise InterpreterError(f"{source.name}: {answer}")
        for key, data in answer.items():
            if data and data != raw[key]:
                _view(storages[key]).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def _ask(self, message: bytes) -> Any:
        child = self._start()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(struct.pack("<q", len(message)) + message)
            child.stdin.flush()
            (size,) = struct.unpack("<q", child.stdout.read(8))
            return pickle.loads(child.stdout.read(size))
        except (BrokenPipeError, struct.error) as error:
            code = child.wait()
            self._child = None
            raise InterpreterError(f"the interpreter process ended with {code}") from error

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            path = os.pathsep.join(p for p in (_ROOT, os.environ.get("PYTHONPATH", "")) if p)
            env = {
                **os.environ,
                "TRITON_INTERPRET": "1",
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
            }
            self._child = subprocess.Popen(
                [sys.executable, "-m", "sitsopt.runtime.triton.interpreter_child"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
            )  # fmt: skip
            atexit.register(self.close)
        return self._child


def _pack(arg: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    if arg.device.type != "cpu":
        raise InterpreterError(f"the interpreter reads CPU memory, not tensors on {arg.device}")
    storage = arg.untyped_storage()
    key = storage.data_ptr() or id(storage)
    storages[key] = storage
    dtype = str(arg.dtype).removeprefix("torch.")
    return ("tensor", key, dtype, tuple(arg.shape), arg.stride(), arg.storage_offset())


def _view(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]


def _sent(storage: torch.UntypedStorage) -> bytes | str:
    """The bytes of a storage, or the path of the shared file that it maps: the child maps it too."""
    path = getattr(storage, "filename", None)
    return path if path else _view(storage).numpy().tobytes()


_shared: Interpreter | None = None


def interpret(source: Source, grid: tuple[int, ...], args: list[Any]) -> None:
    """`Interpreter.run` in this process's one child."""
    global _shared
    if _shared is None:
        _shared = Interpreter()
    _shared.run(source, grid, args)
