"""A planned region as a callable: built through the kernel cache, called through one op, kept across processes."""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...emit.kernel import ISAS
from ...graph.facts import DTYPES
from ..kernels import load
from ..kernels.build import build
from ..kernels.toolchain import BuildError, kernel_flags, machine_isa
from .plan import SYMBOL, Facts, Planned

SCALAR_TYPES = {"bool": 11, "bf16": 15, "f32": 6, "i64": 4, "u8": 0}  # c10::ScalarType
LARGEST_CONSTANT = 1 << 20  # bytes of the graph's own constants that are written out with it
SIZES: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "sym_max": max,
    "sym_min": min,
}


class Region:
    """A graph's arguments in, its results out, in a tuple. Safe from several threads: each call has room of its own.

    Raises RuntimeError for tensors of other sizes than it was made for, IndexError for an index out of range.
    """

    def __init__(self, planned: Planned) -> None:
        """Build and load. Raises BuildError."""
        self.planned = planned
        load.ops()
        made = build("region", planned.text, *kernel_flags(ISAS[machine_isa().name]))
        self.library = ctypes.CDLL(str(made.path))
        self.seconds = made.seconds
        self._bind()
        self.handle = self._add()
        self.op = torch.ops.sits_cpp.region.default
        self.plain = all(kind == "result" and n == i for i, (kind, n) in enumerate(planned.outputs))

    def _bind(self) -> None:
        table = (ctypes.c_void_p * max(len(self.planned.pointers), 1))()
        for i, (kernel, suffix) in enumerate(self.planned.pointers):
            table[i] = _function(load.kernel(kernel), f"{kernel.symbol}_{suffix}")
        getattr(self.library, f"{SYMBOL}_bind")(table)

    def _add(self) -> int:
        room = getattr(self.library, f"{SYMBOL}_room")
        room.restype = ctypes.c_int64
        facts = [*_flat(self.planned.arguments), *_flat(self.planned.results)]
        table = (ctypes.c_int64 * len(facts))(*facts)
        ops = load.ops()
        handle: int = ops.sits_add_region(
            _function(self.library, SYMBOL), room(1), room(0), self._input_bytes(), table
        )
        if handle < 0:
            raise BuildError("too many regions in one process")
        for kernel, state, length, tokens in self.planned.caches:
            dtype = SCALAR_TYPES[kernel.dtype]
            sizes = (kernel.kv_heads, kernel.head_dim, kernel.value_dim)
            numbers = [state, length, tokens, *sizes, dtype, *load.kv_numbers(kernel)]
            table = (ctypes.c_int64 * len(numbers))(*numbers)
            ops.sits_region_cache(handle, table, kernel.layout.encode())
        weakref.finalize(self, ops.sits_drop_region, handle)
        return handle

    def _input_bytes(self) -> int:
        """What a member needs for the input of the largest linear."""
        most = max(64, 4 * self.planned.floats)
        for kernel, rows, k in self.planned.inputs:
            room = getattr(load.kernel(kernel), f"{kernel.symbol}_room")
            room.argtypes, room.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_int64
            most = max(most, room(rows, k))
        return (most + 63) // 64 * 64

    def __call__(self, *args: Any) -> Sequence[Any]:
        planned = self.planned
        tensors = [args[i] for i in planned.places]
        tensors += [torch.tensor(args[i]) for i in planned.numbers]
        results = self.op(tensors + planned.constants, self.handle)
        if self.plain:
            return results  # type: ignore[no-any-return]
        return tuple(_output(kind, what, args, results) for kind, what in planned.outputs)

    def serialize(self) -> Region:
        """Itself, to be pickled. Raises TypeError where it carries large constants."""
        if any(c.nbytes > LARGEST_CONSTANT for c in self.planned.constants):
            raise TypeError("the graph carries large constants of its own")
        return self

    def __reduce__(self) -> Any:
        return Region, (self.planned,)


def _function(library: ctypes.CDLL, symbol: str) -> int:
    found = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    assert found is not None
    return found


def _flat(tensors: Sequence[Facts]) -> list[int]:
    """Tensors as the op reads them."""
    out = [len(tensors)]
    for dtype, sizes, strides, written in tensors:
        assert DTYPES[dtype]
        out += [SCALAR_TYPES[dtype], int(written), len(sizes), *sizes, *strides]
    return out


def _output(kind: str, what: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
    if kind == "result":
        return results[what]
    if kind == "argument":
        return args[what]
    return _size(what, args) if kind == "size" else what


def _size(tree: Any, args: Sequence[Any]) -> int:
    kind, *rest = tree
    if kind == "arg":
        return args[rest[0]]  # type: ignore[no-any-return]
    if kind == "const":
        return rest[0]  # type: ignore[no-any-return]
    return SIZES[kind](_size(rest[0], args), _size(rest[1], args))
