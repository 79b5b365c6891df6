"""Kernel text as a Python module: Triton reads a kernel's source from a file, so the text is put in one."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from ..cachedir import root

_loaded: dict[str, ModuleType] = {}


def cache_dir() -> Path:
    """The part of the cache folder for Triton."""
    return root() / "triton"


def digest(*parts: str) -> str:
    """A short name for a set of texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    with os.fdopen(handle, "w") as out:
        out.write(text)
    os.replace(scratch, path)


def load(text: str, name: str) -> Any:
    """The function `name` of a kernel text, imported once a process."""
    key = digest(text)
    if key not in _loaded:
        path = cache_dir() / "text" / f"{name}-{key}.py"
        if not path.exists() or path.read_text() != text:
            write_whole(path, text)
        spec = importlib.util.spec_from_file_location(f"sitsopt_kernel_{key}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _loaded[key] = module
    return getattr(_loaded[key], name)
