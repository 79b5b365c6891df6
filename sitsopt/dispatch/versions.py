"""Which of many dicts were written to since we last looked, in one call.

CPython up to 3.12 stamps a dict with a new number at every write (PEP 509). Reading two thousand of them takes a
loop of a few microseconds in C; `available` proves on this interpreter that the stamps are there and move.
"""

from __future__ import annotations

import ctypes
import functools
import sysconfig
from collections.abc import Sequence
from typing import Any

from ..runtime.kernels.build import build
from ..runtime.kernels.toolchain import BuildError

TEXT = r"""
#include <Python.h>
#include <stdint.h>

extern "C" {

// The first dict whose stamp differs from the one noted, or -1.
long sits_changed(PyObject **dicts, const uint64_t *stamps, long count) {
  for (long i = 0; i < count; ++i)
    if (((PyDictObject *)dicts[i])->ma_version_tag != stamps[i]) return i;
  return -1;
}

void sits_note(PyObject **dicts, uint64_t *stamps, long count) {
  for (long i = 0; i < count; ++i) stamps[i] = ((PyDictObject *)dicts[i])->ma_version_tag;
}
}
"""


class Versions:
    """The stamps of `dicts` (kept alive) as they were at the last `note`."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        library = _library()
        if library is None:
            raise RuntimeError("dict versions cannot be read here; ask `available` first")
        self.dicts = list(dicts)
        self.count = len(self.dicts)
        self.places = (ctypes.c_void_p * self.count)(*map(id, self.dicts))
        self.stamps = (ctypes.c_uint64 * self.count)()
        self._changed = functools.partial(
            library.sits_changed, self.places, self.stamps, self.count
        )
        library.sits_note(self.places, self.stamps, self.count)

    def changed(self) -> bool:
        """Whether any dict was written to since this object was made."""
        return bool(self._changed() >= 0)


@functools.cache
def available() -> str:
    """Empty where dict versions work, else why they do not."""
    try:
        library = _library()
    except BuildError as error:
        return str(error)
    if library is None:
        return "this Python does not stamp its dicts (3.12 was the last to)"
    probe: dict[str, int] = {"a": 1}
    versions = Versions([probe])
    before = versions.changed()
    probe["a"] = 2
    if before or not versions.changed():
        return "this Python's dict stamps do not move with a write"
    return ""


@functools.cache
def _library() -> Any:
    import sys

    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13):
        return None
    include = sysconfig.get_paths()["include"]
    flags = ["-std=c++17", "-O2", "-fPIC", "-w", f"-I{include}"]
    built = build("dict_versions", TEXT, flags, [])
    library = ctypes.PyDLL(str(built.path))
    library.sits_changed.restype = ctypes.c_long
    library.sits_changed.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    library.sits_note.restype = None
    library.sits_note.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    return library
