"""What is built on another thread while Dynamo traces."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading

started = []
class Thread:
    def __init__(self, target, **kwargs):
        self.target = target
    def start(self):
        before = set(sys.modules)
        self.target()
        started.append(sorted(m for m in set(sys.modules) - before if m.startswith(("torch", "sitsopt"))))

threading.Thread = Thread
from sitsopt.runtime.kernels.load import build_ahead
build_ahead()
print(started)
"""


def test_the_thread_imports_nothing_of_torch() -> None:
    """Two threads that import modules which import each other see them half made: a first call failed of it."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[[]]"
