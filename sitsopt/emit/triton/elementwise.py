"""Triton text of a fused pointwise kernel.

Dense operands share one running index. Otherwise a program takes a tile of rows and columns: the columns are
the last dimension, the rows all others, taken apart by division once a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..expr import Elementwise, Operand
from .pointwise import render
from .source import HEADER, TL, Param, Source, Writer, floats, function, integers, pointer


def source(kernel: Elementwise) -> Source:
    """The kernel. Its grid: (blocks,) when dense, else (blocks of rows * blocks of columns,)."""
    write = Writer()
    write(HEADER)
    params = _params(kernel)
    constants = {"BLOCK": 1024} if kernel.dense else {"ROWS": 4, "COLS": 256}
    ops = ", ".join(f"{out.name} {out.dtype}" for out, _ in kernel.outputs)
    with function(write, kernel.name, params, constants, f"Pointwise, one pass: {ops}."):
        if kernel.dense:
            _dense_index(write, kernel.wide)
        else:
            _tile_index(write, kernel)
        _body(write, kernel)
    return Source(kernel.name, "elementwise", write.text(), params, tuple(constants.items()))


def _params(kernel: Elementwise) -> tuple[Param, ...]:
    params = [pointer(f"{o.name}_ptr", o.dtype) for o in kernel.operands]
    params += floats(*kernel.scalars)
    if kernel.dense:
        return (*params, *integers("n", wide=kernel.wide))
    params += integers(*sizes(kernel.rank), wide=kernel.wide)
    for operand in kernel.operands:
        params += integers(*stride_names(operand), wide=kernel.wide, aligned=True)
    return tuple(params)


def sizes(rank: int) -> list[str]:
    """What the sizes of the result are called."""
    return [f"d{i}" for i in range(rank)]


def stride_names(operand: Operand) -> list[str]:
    """The strides of an operand that are arguments."""
    return [f"{operand.name}_s{i}" for i, kind in enumerate(operand.strides) if kind == "?"]


def _dense_index(write: Writer, wide: bool) -> None:
    start = "tl.program_id(0).to(tl.int64)" if wide else "tl.program_id(0)"
    write(f"at = {start} * BLOCK + tl.arange(0, BLOCK)")
    write("keep = at < n")


def _tile_index(write: Writer, kernel: Elementwise) -> None:
    last = f"d{kernel.rank - 1}"
    outer = " * ".join(sizes(kernel.rank - 1)) or "1"
    program = "tl.program_id(0).to(tl.int64)" if kernel.wide else "tl.program_id(0)"
    write(f"""
        across = tl.cdiv({last}, COLS)
        program = {program}
        row = program // across * ROWS + tl.arange(0, ROWS)
        col = program % across * COLS + tl.arange(0, COLS)
        keep = (row < {outer})[:, None] & (col < {last})[None, :]
    """)
    write("rest = row")
    for dim in reversed(range(kernel.rank - 1)):
        if dim:
            write(f"i{dim} = rest % d{dim}")
            write(f"rest = rest // d{dim}")
        else:
            write("i0 = rest")


def _offset(operand: Operand, rank: int) -> str:
    if not operand.strides:
        return f"row[:, None] * d{rank - 1} + col[None, :]"
    terms: dict[bool, list[str]] = {False: [], True: []}
    for dim, kind in enumerate(operand.strides):
        if kind == "0":
            continue
        index = "col" if dim == rank - 1 else f"i{dim}"
        terms[dim == rank - 1].append(index if kind == "1" else f"{index} * {operand.name}_s{dim}")
    rows = " + ".join(terms[False]) or "row * 0"
    cols = " + ".join(terms[True]) or "col * 0"
    return f"({rows})[:, None] + ({cols})[None, :]"


def _body(write: Writer, kernel: Elementwise) -> None:
    values = {}
    for operand in kernel.inputs:
        at = "at" if kernel.dense else f"{operand.name}_at"
        if not kernel.dense:
            write(f"{at} = {_offset(operand, kernel.rank)}")
        wide = "" if operand.dtype == "i1" else ".to(tl.float32)"
        zero = "False" if operand.dtype == "i1" else "0"
        name = f"in_{operand.name}"
        write(f"{name} = tl.load({operand.name}_ptr + {at}, mask=keep, other={zero}){wide}")
        values[operand.name] = name
    results = render(write, [expr for _, expr in kernel.outputs], values)
    for (operand, _), result in zip(kernel.outputs, results, strict=True):
        _store(write, operand, result, kernel)


def _store(write: Writer, operand: Operand, result: str, kernel: Elementwise) -> None:
    at = "at"
    if not kernel.dense:
        at = f"{operand.name}_at"
        write(f"{at} = {_offset(operand, kernel.rank)}")
    value = result if operand.dtype == "i1" else f"({result}).to({TL[operand.dtype]})"
    if operand.dtype == "i1":
        value = f"({result}) != 0"
    write(f"tl.store({operand.name}_ptr + {at}, {value}, mask=keep)")


def grid(kernel: Elementwise, source: Source, shape: Sequence[int]) -> tuple[int]:
    """How many programs a result of this shape takes."""
    if kernel.dense:
        total = 1
        for size in shape:
            total *= size
        return (-(-total // source.constant("BLOCK")),)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return (-(-rows // source.constant("ROWS")) * -(-shape[-1] // source.constant("COLS")),)
