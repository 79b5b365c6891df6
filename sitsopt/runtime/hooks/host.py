"""Where facts come from: a file tree with `proc` and `sys`, NVML, the environment. All three can be replaced,
so that a plan can be made for a machine that is not there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Absent(Exception):
    """A source of facts that this machine does not have; the text says which."""


@dataclass(frozen=True)
class Host:
    """A machine to ask. `nvml` is a module with NVML's functions (`pynvml`), or None: `nvml_problem` says why."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    nvml: Any = None
    nvml_problem: str = "nvidia-ml-py is not installed"

    @staticmethod
    def here() -> Host:
        """This machine."""
        try:
            import pynvml
        except Exception as error:  # a broken driver package may raise anything
            reason = (
                "nvidia-ml-py is not installed" if isinstance(error, ImportError) else repr(error)
            )
            return Host(nvml_problem=reason)
        return Host(nvml=pynvml)

    @property
    def live(self) -> bool:
        """Whether the file tree is that of the machine itself: then psutil may be asked as well."""
        return self.root == Path("/")

    def path(self, name: str) -> Path:
        """The file that is called `name` (absolute, as `/proc/self/status`) on this host."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """The stripped text of a file. Raises Absent where there is none that can be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError as error:
            raise Absent(f"{name}: {error.strerror}") from error

    def field(self, name: str, key: str) -> str:
        """The value of `key:` in a file such as /proc/self/status. Raises Absent."""
        found = re.search(rf"^{re.escape(key)}:\s*(.*)$", self.read(name), re.MULTILINE)
        if found is None:
            raise Absent(f"{name} has no {key}")
        return found[1].strip()


def cpu_list(text: str) -> list[int]:
    """The numbers of a kernel list such as `0-3,8,10-11`, in order. Raises ValueError for anything else."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


def as_cpu_list(cpus: list[int]) -> str:
    """The reverse of `cpu_list`: `0-3,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
