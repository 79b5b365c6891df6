"""Which of many dicts, classes, lists and sets were written to since we last looked, in one call.

CPython up to 3.12 stamps a dict with a new number at every write (PEP 509), and a class with another one when it or
one of its bases changes. Reading three thousand of them takes a loop of a few microseconds in C; `available` proves
on this interpreter that the stamps are there and move. Lists have no stamp: their items are compared by address.
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

// 1 if a stamp differs from the one noted. A class nobody asked for an attribute since it changed has stamp 0.
// The items of all lists, as they were, lie one after another.
int sits_changed(PyObject **dicts, const uint64_t *stamps, long count, PyTypeObject **types, const uint64_t *marks,
                 long kinds, PyListObject **lists, const uint64_t *lengths, long rows, PyObject **items) {
  for (long i = 0; i < count; ++i)
    if (((PyDictObject *)dicts[i])->ma_version_tag != stamps[i]) return 1;
  for (long i = 0; i < kinds; ++i)
    if (types[i]->tp_version_tag != marks[i]) return 1;
  for (long i = 0; i < rows; ++i) {
    long length = (long)lengths[i];
    if (Py_SIZE(lists[i]) != length) return 1;
    for (long j = 0; j < length; ++j)
      if (lists[i]->ob_item[j] != items[j]) return 1;
    items += length;
  }
  return 0;
}

void sits_note(PyObject **dicts, uint64_t *stamps, long count, PyTypeObject **types, uint64_t *marks, long kinds) {
  for (long i = 0; i < count; ++i) stamps[i] = ((PyDictObject *)dicts[i])->ma_version_tag;
  for (long i = 0; i < kinds; ++i) marks[i] = types[i]->tp_version_tag;
}
}
"""


class Versions:
    """The stamps of `dicts` and `types`, the items of `lists` and `sets` (all kept alive) as they were when this object
    was made."""

    def __init__(
        self,
        dicts: Sequence[dict[Any, Any]],
        types: Sequence[type] = (),
        lists: Sequence[list[Any]] = (),
        sets: Sequence[set[Any]] = (),
    ) -> None:
        library = _library()
        if library is None:
            raise RuntimeError("dict versions cannot be read here; ask `available` first")
        self.dicts, self.types = list(dicts), list(types)
        self.lists, self.sets = list(lists), list(sets)
        for each in self.types:
            getattr(each, "_no_such_name", None)  # a look-up gives a class its stamp
        self.items = [item for each in self.lists for item in each]
        self.members = [frozenset(each) for each in self.sets]
        stamped = (*_places(self.dicts), *_places(self.types))
        rows, lengths, count = _places(self.lists)
        lengths[:] = [*map(len, self.lists)]
        self._changed = functools.partial(
            library.sits_changed, *stamped, rows, lengths, count, _places(self.items)[0]
        )
        library.sits_note(*stamped)

    def changed(self) -> bool:
        """Whether any of them was written to since."""
        return bool(self._changed()) or self.sets != self.members


def _places(objects: Sequence[Any]) -> tuple[Any, Any, int]:
    count = len(objects)
    return (ctypes.c_void_p * count)(*map(id, objects)), (ctypes.c_uint64 * count)(), count


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
    kind = type("Probe", (), {"a": 1})
    row = [1]
    for write in (lambda: probe.update(a=2), lambda: setattr(kind, "a", 2), lambda: row.append(2)):
        versions = Versions([probe], [kind], [row])
        before = versions.changed()
        write()
        if before or not versions.changed():
            return "this Python's stamps do not move with a write"
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
    half: list[Any] = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    library.sits_note.argtypes = [*half, *half]
    library.sits_changed.argtypes = [*half, *half, *half, ctypes.c_void_p]
    library.sits_changed.restype, library.sits_note.restype = ctypes.c_int, None
    return library
