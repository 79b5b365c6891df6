"""How fast the kernels are here: bytes a second, beside a plain read loop and beside ATen, in one process.

Every line alternates probe, kernel and peers (A B C A B C ...) and takes medians, as a machine's speed drifts.
Operands rotate through at least 300 MB, so that no cache holds them; `cached` lines use one set.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...graph.packed import pack
from . import load, lookup

ROTATION_BYTES = 320 * 10**6
Call = Callable[[int], object]

LINEARS = [
    ("linears", [(576, 576), (192, 576), (192, 576)]),
    ("linears", [(576, 576)]),
    ("linears", [(576, 1536)]),
    ("linears", [(49152, 576)]),
    ("linears", [(4096, 4096)]),
    ("gated", [(1536, 576), (1536, 576)]),
]
# scheme, group, with lowest values, what shares a scale
SCHEMES = [("int8", 0, False, ""), ("int4", 64, True, ""), ("fp8", 0, False, "row")]
PACKED = [(49152, 576), (4096, 4096), (576, 1536)]
# (batch, query heads, kv heads, query rows, keys, head size, causal)
ATTENTION = [
    (1, 9, 3, 1, 512, 64, False),
    (1, 9, 3, 1, 7000, 64, False),
    (1, 9, 3, 8, 7000, 64, False),
    (1, 32, 8, 1, 4096, 128, False),
    (1, 9, 3, 512, 512, 64, True),
]


@dataclass
class Line:
    """One thing to measure: calls that take the number of an operand set, and what they read."""

    name: str
    shape: str
    rows: int
    bytes: int
    sets: int
    kernel: Call
    peers: dict[str, Call]
    probe: Call


def bench_kernels(
    dtypes: tuple[str, ...] = ("bf16", "f32"), rows: tuple[int, ...] = (1, 8), seconds: float = 0.5
) -> list[dict[str, Any]]:
    """One dict a line: name, shape, rows, gbs, probe_gbs, ratio (of gbs to probe_gbs), versus (how many times as
    fast as each peer), us (median), dtype, threads, cached. `seconds` is spent on every line, about."""
    lines = []
    for dtype in dtypes:
        buffer = _buffer(load.dtype_of(dtype))
        for cached in (False, True):
            for line in _lines(buffer, dtype, rows, cached):
                lines.append({**_measure(line, seconds), "dtype": dtype, "cached": cached})
    return lines


def _buffer(dtype: torch.dtype) -> torch.Tensor:
    """ROTATION_BYTES of normal numbers; they repeat, their addresses do not."""
    piece = torch.randn(1 << 20).to(dtype)
    return piece.repeat(-(-ROTATION_BYTES // (piece.numel() * piece.element_size())))


def _lines(buffer: torch.Tensor, dtype: str, rows: tuple[int, ...], cached: bool) -> Iterator[Line]:
    probe = _probe(buffer, dtype)
    for name, shapes in LINEARS:
        for count in rows:
            line = _linear_line(name, shapes, count, buffer, probe)
            if line and (not cached or line.bytes < 4 * 10**6):
                yield _one_set(line) if cached else line
    for scheme, shape in itertools.product(SCHEMES if dtype == "bf16" else [], PACKED):
        for line in _packed_lines(scheme, shape, rows, buffer, probe):
            if not cached or line.bytes < 4 * 10**6:
                yield _one_set(line) if cached else line
    for facts in ATTENTION:
        line = _attention_line(facts, buffer, probe)
        if line and (not cached or line.bytes < 4 * 10**6):
            yield _one_set(line) if cached else line


def _one_set(line: Line) -> Line:
    line.sets = 1
    return line


def _probe(buffer: torch.Tensor, dtype: str) -> Callable[[int, int], Call]:
    """A plain read of `size` bytes from the i-th place on, by as many threads as torch uses."""
    wanted = load.describe("linears", buffer.dtype)
    read = getattr(load.kernel(wanted), f"{wanted.symbol}_probe")
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    read.restype = ctypes.c_float
    start = buffer.data_ptr()
    return lambda size, stride: lambda i: read(start + i * stride, size, torch.get_num_threads())


def _linear_line(
    name: str,
    shapes: list[tuple[int, int]],
    rows: int,
    buffer: torch.Tensor,
    probe: Callable[[int, int], Call],
) -> Line | None:
    op = lookup(name, dtype=buffer.dtype)
    if op is None:
        return None
    one = sum(n * k for n, k in shapes)
    sets = [
        [
            w.view(shape)
            for w, shape in zip(part.split([n * k for n, k in shapes]), shapes, strict=True)
        ]
        for part in buffer.split(one)[: buffer.numel() // one]
    ]
    x = torch.randn(rows, shapes[0][1]).to(buffer.dtype)
    none = [None] * len(shapes)

    def peer(i: int) -> object:
        outs = [F.linear(x, w) for w in sets[i]]
        return outs if name == "linears" else F.silu(outs[0]) * outs[1]

    def kernel(i: int) -> object:
        return op(x, sets[i], none) if name == "linears" else op(x, *sets[i], None, None, "silu")

    size = one * buffer.element_size()
    shape = "+".join(f"{n}x{k}" for n, k in shapes)
    return Line(name, shape, rows, size, len(sets), kernel, {"aten": peer}, probe(size, size))


def _packed_lines(
    scheme: tuple[str, int, bool, str],
    shape: tuple[int, int],
    rows: tuple[int, ...],
    buffer: torch.Tensor,
    probe: Callable[[int, int], Call],
) -> Iterator[Line]:
    """Quantized weights beside ATen's linear over the same weights unquantized; both rotate."""
    name, group, low, per = scheme
    op = lookup("packed_linears", dtype=buffer.dtype, scheme=name, group=group, low=low, inputs="")
    if op is None:
        return
    n, k = shape
    one = pack(buffer[: n * k].view(shape), name, group, low, per)
    size = one.nbytes
    bytes_ = one.view(-1).repeat(max(1, ROTATION_BYTES // size))
    sets = [[part.view(one.shape)] for part in bytes_.split(size)]
    plain = [part.view(shape) for part in buffer.split(n * k)[: buffer.numel() // (n * k)]]
    text = f"{name}, groups of {group}" if group else name
    for count in rows:
        x = torch.randn(count, k).to(buffer.dtype)

        def kernel(i: int, x: torch.Tensor = x) -> object:
            return op(x, sets[i], [None], [n], name, group, low, "")

        def peer(i: int, x: torch.Tensor = x) -> object:
            return F.linear(x, plain[i % len(plain)])

        peers: dict[str, Call] = {f"aten {str(buffer.dtype).removeprefix('torch.')}": peer}
        yield Line(
            f"packed {text}", f"{n}x{k}", count, size, len(sets), kernel, peers, probe(size, size)
        )


def _attention_line(
    facts: tuple[int, int, int, int, int, int, bool],
    buffer: torch.Tensor,
    probe: Callable[[int, int], Call],
) -> Line | None:
    batch, heads, kv_heads, rows, keys, dim, causal = facts
    op = lookup("attention", dtype=buffer.dtype, head_dim=dim)
    if op is None:
        return None
    one = 2 * batch * kv_heads * keys * dim
    parts = buffer.split(one)[: buffer.numel() // one]
    sets = [part.view(2, batch, kv_heads, keys, dim) for part in parts]
    q = torch.randn(batch, heads, rows, dim).to(buffer.dtype)
    scale, group = dim**-0.5, heads // kv_heads

    def repeated(i: int) -> object:
        k, v = (t.repeat_interleave(group, 1) for t in sets[i])
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def grouped(i: int) -> object:
        k, v = sets[i]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    size = one * buffer.element_size()
    shape = f"{heads}/{kv_heads} heads of {dim}, {keys} keys" + (", causal" if causal else "")
    peers: dict[str, Call] = {"sdpa": grouped, "sdpa repeated": repeated}
    return Line(
        "attention", shape, rows, size, len(sets),
        lambda i: op(q, *sets[i], None, scale, causal), peers, probe(size, size),
    )  # fmt: skip


def _measure(line: Line, seconds: float) -> dict[str, Any]:
    """Alternates everything for about `seconds`, at least five rounds; each call takes the next operand set."""
    calls = {"probe": line.probe, "kernel": line.kernel, **line.peers}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    started, turn = time.perf_counter(), 0
    while time.perf_counter() - started < seconds or len(times["kernel"]) < 5:
        for name, call in calls.items():
            turn += 1
            begun = time.perf_counter()
            call(turn % line.sets)
            times[name].append(time.perf_counter() - begun)
    took = {name: statistics.median(values) for name, values in times.items()}
    gbs, probe_gbs = (line.bytes / took[name] / 1e9 for name in ("kernel", "probe"))
    return {
        "name": line.name,
        "shape": line.shape,
        "rows": line.rows,
        "gbs": round(gbs, 2),
        "probe_gbs": round(probe_gbs, 2),
        "ratio": round(gbs / probe_gbs, 3),
        "versus": {name: round(took[name] / took["kernel"], 2) for name in line.peers},
        "us": round(took["kernel"] * 1e6, 1),
        "threads": torch.get_num_threads(),
    }
