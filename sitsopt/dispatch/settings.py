"""Everything but the model that decides what a compile gives, as one digest.

Rules, recipe, target and options; versions of Python, torch, triton, transformers and of sitsopt's own text; the
processor, the threads, and the settings of Dynamo, AOTAutograd and Inductor.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..runtime.kernels.toolchain import cpu_flags
from ..session import Session
from ..spec.locate import rule_dirs
from .describe import Describer

DECIDING = ("SITSOPT_ISA", "ATEN_CPU_CAPABILITY", "CXX")  # variables that choose kernels
PACKAGES = ("torch", "triton", "transformers", "sitsopt")


def settings_digest(session: Session, dynamic: bool | None) -> str:
    """SHA-256 over a session's settings and this process's. Raises Opaque."""
    options = session.options
    rules = [file for folder in rule_dirs(options.path) for file in sorted(folder.rglob("*.y*ml"))]
    facts = [
        own_text(),
        files_digest(rules),
        machine(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.backends.mkldnn.enabled,
        [os.environ.get(name) for name in DECIDING],
        dynamic,
        {k: _ordered(v) for k, v in vars(options).items()},
        session.recipe,
        session.target,
        session.plan.weights.facts() if session.plan.weights else None,
        *(_portable(config) for config in _configs()),
    ]
    return Describer().digest(facts)


def files_digest(files: Iterable[str | Path]) -> str:
    """SHA-256 over the contents of files, in the order given."""
    total = hashlib.sha256()
    for file in files:
        data = Path(file).read_bytes()
        total.update(f"{len(data)}:".encode() + data)
    return total.hexdigest()


@functools.cache
def own_text() -> str:
    """sitsopt's own code: a version number does not change with every edit."""
    return files_digest(sorted(Path(__file__).parents[1].rglob("*.py")))


@functools.cache
def machine() -> tuple[str, ...]:
    """Interpreter, packages and processor."""
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    devices = [
        f"{i}: {torch.cuda.get_device_name(i)}"
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return (sys.version, platform.machine(), *versions, *sorted(cpu_flags()), *devices)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _configs() -> list[Any]:
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    return [torch._dynamo.config, torch._functorch.config, torch._inductor.config]


# where files lie and how many helpers compile; neither changes what is compiled
PLACES = ("dir", "path", "worker", "compile_threads", "log", "debug", "cache")


def _portable(config: Any) -> dict[str, str]:
    """A torch config as plain text, without what differs from process to process."""
    found: dict[str, Any] = config.save_config_portable()
    return {
        k: repr(_ordered(v)) for k, v in sorted(found.items()) if not any(p in k for p in PLACES)
    }


def _ordered(value: Any) -> Any:
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
