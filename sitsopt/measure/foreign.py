"""A runtime that is not torch, in a child process of its own that is truly idle while another runs.

Two thread pools in one process spin against each other, and even in two processes a pool may spin
after its work. So the child is stopped by the operating system between its turns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from sitsopt.measure.decode import Run
from sitsopt.measure.errors import InputError
from sitsopt.measure.models import Loaded

RUNTIMES = {
    "llama.cpp": ("sitsopt.measure.llamacpp", ("xllamacpp", "llama_cpp"), "pip install xllamacpp"),
}


def why_not(name: str, loaded: Loaded) -> str | None:
    """Why this runtime cannot run here, or None when it can."""
    _, packages, install = RUNTIMES[name]
    if not any(importlib.util.find_spec(package) for package in packages):
        return f"not installed: {install}"
    if loaded.gguf is None:
        return f"{name} reads a .gguf file, and {loaded.name} is none"
    return None


class ForeignEngine:
    """The parent's end. Answers `run` like a torch engine does."""

    def __init__(self, name: str, gguf: Path, max_len: int, threads: int) -> None:
        self.name = name
        command = [sys.executable, "-m", RUNTIMES[name][0], str(gguf), str(max_len), str(threads)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            hello = self._answer()
        except BaseException:
            self.close()
            raise
        self.settings: str = hello["settings"]
        self.load_s: float = hello["load_s"]
        self.peak_mb: float = hello["peak_mb"]
        self._pause()

    def run(self, ids: torch.Tensor, new: int) -> Run:
        """One prefill of `ids` from an empty cache and `new` greedy steps, timed by the child."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"ids": ids[0].tolist(), "new": new}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.peak_mb = answer["peak_mb"]
        self._pause()
        return Run(answer["prefill_s"], answer["decode_s"], answer["tokens"])

    def close(self) -> None:
        """End the child, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
            self.process.send_signal(signal.SIGCONT)
        self.process.communicate()

    def _pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.process.stderr.read().strip().splitlines()[-4:]
            raise InputError(f"{self.name} ended: " + " | ".join(said))
        return json.loads(line)
