"""Loads the ops and, on demand, the kernels behind them. One state a process, behind one lock."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from ...emit.cpp import kernel_text, ops_text
from ...emit.cpp.attention_kv import PARTS
from ...emit.kernel import ISAS, Attention, Kernel, KvAttention, Linear, Packed
from ...graph.kv.layout import Layout, Shape, spans
from .. import vector_isa
from .build import Built, build
from .toolchain import BuildError, cpu_flags, kernel_flags, machine_isa, torch_flags

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
FEW_ROWS, ANY_ROWS = 16, 2**62
_DTYPE_INDEX = {"f32": 0, "bf16": 1, "f16": 2}  # as in the ops' text


def dtype_of(name: str) -> torch.dtype:
    """The dtype that the kernels call f32, bf16 or f16."""
    return next(dtype for dtype, known in DTYPE_NAMES.items() if known == name)


@dataclass
class State:
    """What is loaded, what failed and why, and what was built. `ops` is the registration unit."""

    ops: ctypes.CDLL | None = None
    quick: ctypes.PyDLL | None = None
    ops_failure: str = ""
    kernels: dict[Kernel, ctypes.CDLL] = field(default_factory=dict)
    failures: dict[Kernel, str] = field(default_factory=dict)
    built: list[tuple[str, Built]] = field(default_factory=list)


_state = State()
_lock = threading.RLock()


def state() -> State:
    """The process's state, to look at."""
    return _state


def loaded() -> list[Kernel] | None:
    """The kernels of this process, for another one to load with `restore`; None if it has not even the ops."""
    with _lock:
        return None if _state.ops is None else list(_state.kernels)


def restore(wanted: list[Kernel] | None) -> None:
    """What `loaded` gave in another process. Raises BuildError if the ops are not to be had; a kernel that is not
    leaves its op to ATen, as ever."""
    if wanted is not None:
        ops()
        for each in wanted:
            with contextlib.suppress(BuildError):
                kernel(each)


def build_ahead() -> None:
    """Start building the ops and asking Inductor's probes, some twenty seconds the first time, on a core that a trace
    leaves idle. Nothing is loaded; who needs them waits for the build and hears what went wrong with it."""

    def work() -> None:
        with contextlib.suppress(BuildError, OSError):
            build("ops", ops_text(), *torch_flags())
        with contextlib.suppress(Exception):  # Inductor asks again, and says what is wrong
            vector_isa.working()

    if _state.ops is None and not _state.ops_failure:
        vector_isa.imported()
        threading.Thread(target=work, name="sitsopt-build", daemon=True).start()


def ops() -> ctypes.CDLL:
    """The registration unit, loaded once; raises BuildError with the recorded reason."""
    with _lock:
        if _state.ops is None:
            if _state.ops_failure:
                raise BuildError(_state.ops_failure)
            try:
                _state.ops = _load_ops()
            except (BuildError, OSError, RuntimeError) as error:
                _state.ops_failure = str(error)
                raise BuildError(_state.ops_failure) from error
        return _state.ops


def _load_ops() -> ctypes.CDLL:
    made = build("ops", ops_text(), *torch_flags())
    _state.built.append(("ops", made))
    torch.ops.load_library(made.path)
    from . import fake  # its registrations need the schemas just loaded

    fake.register()
    quick = ctypes.PyDLL(str(made.path))  # for calls too short to let the interpreter go
    for each in (quick.sits_moved, quick.sits_forget):
        each.argtypes = [ctypes.c_void_p]
    _state.quick = quick
    library = ctypes.CDLL(str(made.path))
    library.sits_tiles_read.restype = ctypes.c_int64
    library.sits_set_packed.argtypes = [
        ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
        ctypes.c_void_p,
    ]  # fmt: skip
    library.sits_set_kv.argtypes = [
        ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    library.sits_add_region.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    library.sits_add_region.restype = ctypes.c_int64
    library.sits_region_cache.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p]
    library.sits_drop_region.argtypes = [ctypes.c_int64]
    library.sits_set_most_rows.argtypes = [ctypes.c_int, ctypes.c_int64]
    for dtype, index in _DTYPE_INDEX.items():
        library.sits_set_most_rows(index, most_query_rows(dtype))
    return library


def most_query_rows(dtype: str) -> int:
    """Query positions up to which the attention kernel is the faster one.

    Without matrix units it wins at any number: against SDPA on Zen 4, one thread, 512 x 512 with 9 heads of 64,
    bf16 5.7 ms to 8.6, causal 3.4 to 8.6, f32 8.3 to 8.0 and 5.1 to 8.0. AMX multiplies bf16 in tiles,
    which SDPA uses and this kernel does not.
    """
    return FEW_ROWS if dtype == "bf16" and "amx_bf16" in cpu_flags() else ANY_ROWS


def kernel(wanted: Kernel) -> ctypes.CDLL:
    """The kernel's object, built, loaded and put behind its op; raises BuildError with the recorded reason."""
    with _lock:
        library = ops()
        if wanted in _state.failures:
            raise BuildError(_state.failures[wanted])
        try:
            if wanted not in _state.kernels:
                _state.kernels[wanted] = _load_kernel(wanted)
            _connect(library, wanted, _state.kernels[wanted])
        except (BuildError, OSError) as error:
            _state.failures[wanted] = str(error)
            raise BuildError(_state.failures[wanted]) from error
        return _state.kernels[wanted]


def _load_kernel(wanted: Kernel) -> ctypes.CDLL:
    made = build(
        wanted.symbol.removeprefix("sits_"), kernel_text(wanted), *kernel_flags(ISAS[wanted.isa])
    )
    _state.built.append((wanted.symbol, made))
    return ctypes.CDLL(str(made.path))


def _address(library: ctypes.CDLL, symbol: str) -> ctypes.c_void_p:
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p)


def _connect(library: ctypes.CDLL, wanted: Kernel, made: ctypes.CDLL) -> None:
    dtype, main = _DTYPE_INDEX[wanted.dtype], _address(made, wanted.symbol)
    if isinstance(wanted, Attention):
        if library.sits_set_attention(dtype, wanted.head_dim, wanted.value_dim, main):
            raise BuildError("too many attention kernels in one process")
    elif isinstance(wanted, KvAttention):
        sizes = (wanted.kv_heads, wanted.head_dim, wanted.value_dim, wanted.layout.encode())
        numbers = kv_numbers(wanted)
        if library.sits_set_kv(dtype, *sizes, (ctypes.c_int64 * len(numbers))(*numbers), main):
            raise BuildError("too many kinds of quantized caches in one process")
    elif isinstance(wanted, Packed):
        args = (dtype, wanted.scheme.encode(), wanted.group, wanted.low, bool(wanted.inputs))
        if library.sits_set_packed(*args, main, _address(made, f"{wanted.symbol}_unpack")):
            raise BuildError("too many kernels for quantized weights in one process")
    else:
        library.sits_set_linear(dtype, main, _address(made, f"{wanted.symbol}_gated"))


def kv_numbers(wanted: KvAttention) -> list[int]:
    """Where the parts of a cache lie and how large it is, in the order of the ops' text."""
    layout = Layout.parse(wanted.layout)
    parts = spans(Shape(layout, wanted.kv_heads, wanted.head_dim, wanted.value_dim))
    numbers = [parts[name].start if name in parts else 0 for name in PARTS]
    numbers += [layout.ring, layout.old, layout.pool(wanted.kv_heads), layout.sinks, layout.tiles]
    numbers += [int(layout.budget > 0 and layout.old > 0), layout.recent, layout.max_len]
    return numbers


def describe(op: str, dtype: torch.dtype, **facts: Any) -> Kernel:
    """The description of the kernel that `op` needs on this machine."""
    isa = machine_isa().name
    if op == "attention":
        head = facts.get("head_dim") or 0
        return Attention(isa, DTYPE_NAMES[dtype], head, facts.get("value_dim") or head)
    if op == "kv_attention":
        bits = Layout.parse(facts["layout"]).bits or 4
        return KvAttention(isa, DTYPE_NAMES[dtype], bits=bits, **facts)
    if op == "packed_linears":
        names = ("scheme", "group", "low", "inputs")
        return Packed(isa, DTYPE_NAMES[dtype], **{n: facts[n] for n in names if n in facts})
    return Linear(isa, DTYPE_NAMES[dtype])
