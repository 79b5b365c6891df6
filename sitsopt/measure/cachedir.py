"""The user's cache folder, and writing into it so that an interrupted run leaves nothing half-written."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sitsopt.runtime.cachedir import root


def cache_dir(kind: str) -> Path:
    """The folder for `kind` inside `SITSOPT_CACHE`, else inside the user's cache folder."""
    folder = root() / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def replace_file(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that takes its place only when the block ends well."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends well; the first writer wins."""
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield part
        with contextlib.suppress(OSError):
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
