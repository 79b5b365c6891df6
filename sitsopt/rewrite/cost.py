"""The cost model: how long a set of graph nodes takes on a target.

    time = max(bytes / bandwidth, operations / peak) + launches * launch time

Bandwidth and peak are those of the target's file, so this is a bound that a good kernel comes near to,
not a forecast of a bad one. It ranks alternatives, and what can be measured is measured instead.

Sizes may be ints, sympy expressions or torch's symbolic ints. They stay symbolic until a time is asked
for; nothing here adds a guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from sitsopt.spec.target import Target

Size = Any  # an int, a float, a sympy expression, or a torch.SymInt


@dataclass(frozen=True)
class Work:
    """What some nodes do: bytes read and written, operations of one operand type (a multiply-add is
    two), and kernels started."""

    bytes: Size = 0
    flops: Size = 0
    launches: int = 0
    dtype: str = "f32"


def exact(size: Size) -> Any:
    """A size as an int, a float or a sympy expression. Reads a SymInt without guarding on it."""
    node = getattr(size, "node", None)
    return size if node is None else node.expr


def bytes_of(shape: Iterable[Size], itemsize: float) -> Any:
    """Bytes of a dense tensor; `itemsize` is in bytes and may be a fraction (0.5 for 4 bits)."""
    total: Any = 1
    for size in shape:
        total = total * exact(size)
    scaled = total * itemsize
    return int(scaled) if isinstance(scaled, float) and scaled.is_integer() else scaled


def linear_flops(rows: Size, inputs: Size, outputs: Size) -> Any:
    """Operations of a matrix product, two a multiply-add."""
    return 2 * exact(rows) * exact(inputs) * exact(outputs)


def expression_us(work: Work, target: Target) -> sympy.Expr | None:
    """Predicted microseconds, with the sizes that are symbols still in it; None when the target does
    not know a fact that the work needs."""
    parts = _parts(work, target)
    if parts is None:
        return None
    move, compute, launch = parts
    return sympy.Max(sympy.sympify(move, strict=True), sympy.sympify(compute, strict=True)) + launch


def predict_us(
    work: Work, target: Target, sizes: Mapping[str, float] | None = None
) -> float | None:
    """Predicted microseconds as a number. `sizes` gives the symbols by name. None when a fact of the
    target or the value of a symbol is unknown."""
    parts = _parts(work, target)
    if parts is None:
        return None
    move, compute, launch = (_number(part, sizes or {}) for part in parts)
    return None if move is None or compute is None else max(move, compute) + (launch or 0.0)


def serial_us(
    works: Iterable[Work], target: Target, sizes: Mapping[str, float] | None = None
) -> float | None:
    """Predicted microseconds of several kernels, one after the other; None when one is unknown."""
    times = [predict_us(work, target, sizes) for work in works]
    return None if None in times else float(sum(time for time in times if time is not None))


def _parts(work: Work, target: Target) -> tuple[Any, Any, float] | None:
    """Microseconds to move the bytes, to do the arithmetic and to launch; None when one is unknown.

    The peak of a CPU stands in no data sheet, as it goes with clock and cores. There the arithmetic
    counts as free: work bound by memory, which is what rewrites save, is still ranked.
    """
    moved, flops = exact(work.bytes), exact(work.flops)
    bandwidth, peak = target.memory.bandwidth_gbs, target.peak_tflops(work.dtype)
    launch = target.links.launch_us
    if peak is None and target.emitter != "cpp" and flops != 0:
        return None
    if (bandwidth is None and moved != 0) or (launch is None and work.launches):
        return None
    move = moved / (bandwidth * 1e3) if bandwidth else 0.0
    compute = flops / (peak * 1e6) if peak else 0.0
    return move, compute, work.launches * (launch or 0.0)


def _number(value: Any, sizes: Mapping[str, float]) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    known = {symbol: sizes[symbol.name] for symbol in value.free_symbols if symbol.name in sizes}
    value = value.subs(known)
    return None if value.free_symbols else float(value)


def saved_us(
    before: Work, after: Work, target: Target, sizes: Mapping[str, float] | None = None
) -> float | None:
    """Microseconds that doing `after` instead of `before` is predicted to save; negative for a loss."""
    old, new = predict_us(before, target, sizes), predict_us(after, target, sizes)
    return None if old is None or new is None else old - new
