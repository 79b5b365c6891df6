"""Triton text of matrix products: which tile a program has, the loop over k, how split sums meet.

Skinny: 16 rows of x against a strip of weight rows, k split over programs; the last program of a strip to finish
adds the parts in order, so results do not depend on timing. Wide: as many programs as the device has units
walk over the tiles of y, a few tile rows at a time, so that the L2 cache serves both operands.
"""

from __future__ import annotations

from ..matmul import Matmul
from .matmul_ends import write_prologue, write_result
from .matmul_tile import accumulators, write_step
from .source import HEADER, Param, Source, Writer, floats, function, integers, pointer


def source(kernel: Matmul) -> Source:
    """The kernel. Grid: (strips, SPLITS) when skinny, else (programs,)."""
    write = Writer()
    write(HEADER)
    params = parameters(kernel)
    constants, warps, stages = _shape(kernel)
    with function(write, kernel.name, params, constants, _doc(kernel)):
        if kernel.skinny:
            _skinny(write, kernel)
        else:
            _wide(write, kernel)
    return Source(
        kernel.name, "matmul", write.text(), params, tuple(constants.items()), warps, stages
    )


def _doc(kernel: Matmul) -> str:
    kept = kernel.weight or kernel.dtype
    return f"x @ w^T in {kernel.dtype}, weights [{kernel.rows}, {kernel.k}] in {kept}."


def _shape(kernel: Matmul) -> tuple[dict[str, int], int, int]:
    """Block sizes, warps, pipeline stages."""
    step = {"i4": kernel.group, "i8": 128, "f8e4m3": 128, "": 64 if kernel.dtype == "f32" else 128}
    if kernel.skinny:
        constants = {"ROWS": 16, "COLS": 32 if kernel.gated else 64, "STEP": step[kernel.weight]}
        return {**constants, "SPLITS": 4}, 4, 3
    rows, cols = (64, 64) if kernel.dtype == "f32" else (128, 64 if kernel.gated else 128)
    step = {"i4": kernel.group, "f8e4m3": 128 if kernel.group else 64}
    constants = {"ROWS": rows, "COLS": cols, "STEP": step.get(kernel.weight, 64), "BAND": 8}
    if kernel.dtype == "f32":
        constants["STEP"] = 32
    return constants, 8, 3


def parameters(kernel: Matmul) -> tuple[Param, ...]:
    """Every argument in order."""
    weight = kernel.weight or kernel.dtype
    if weight == "i4" or (weight == "f8e4m3" and not kernel.native_fp8):
        weight = "u8"
    params = [pointer("x_ptr", kernel.inputs or kernel.dtype), pointer("w_ptr", weight)]
    params += [pointer("x_scale_ptr", "f32")] if kernel.inputs else []
    params += (
        [pointer("scale_ptr", "f16" if kernel.weight == "i4" else "f32")] if kernel.weight else []
    )
    params += [pointer("low_ptr", "f16")] if kernel.low else []
    params += [pointer("gain_ptr", kernel.dtype)] if kernel.norm else []
    params += [pointer("bias_ptr", kernel.dtype)] if kernel.bias else []
    params += [pointer("residual_ptr", kernel.dtype)] if kernel.residual else []
    params += [pointer("y_ptr", kernel.dtype)]
    params += [pointer("part_ptr", "f32"), pointer("lock_ptr", "i32")] if kernel.skinny else []
    params += floats("eps") if kernel.norm else ()
    params += integers("rows")
    params += integers("x_stride", "y_stride", aligned=kernel.k % 16 == 0 and kernel.n % 16 == 0)
    return tuple(params)


def _cols(write: Writer, kernel: Matmul) -> None:
    kind = ".to(tl.int64)" if kernel.rows * kernel.k >= 2**31 else ""
    write(f"n = strip * COLS + tl.arange(0, COLS){kind}")


def _skinny(write: Writer, kernel: Matmul) -> None:
    write("strip = tl.program_id(0)")
    write("part = tl.program_id(1)")
    write("m = tl.arange(0, ROWS)")
    _cols(write, kernel)
    write_prologue(write, kernel)
    _zero(write, kernel)
    pieces = _pieces(kernel)
    write(f"""
        steps = tl.cdiv({kernel.k}, {pieces} * STEP)
        share = tl.cdiv(steps, SPLITS)
    """)
    turn = "block" if pieces > 1 else "step"
    with write.block(
        f"for {turn} in range(part * share, tl.minimum(steps, part * share + share)):"
    ):
        if pieces == 1:
            write_step(write, kernel)
        else:
            with write.block(f"for piece in tl.static_range({pieces}):"):
                write(f"step = block * {pieces} + piece")
                write_step(write, kernel)
    _meet(write, kernel)


def _pieces(kernel: Matmul) -> int:
    """Groups of int4 read in one turn, so that a weight row gives a whole cache line at a time."""
    if kernel.weight != "i4":
        return 1
    wanted = max(1, 256 // kernel.group)
    return next(p for p in (wanted, 4, 2, 1) if p <= wanted and kernel.k // kernel.group % p == 0)


def _zero(write: Writer, kernel: Matmul) -> None:
    kind = "tl.int32" if kernel.inputs == "i8" else "tl.float32"
    for name in accumulators(kernel):
        write(f"{name} = tl.zeros([ROWS, COLS], {kind})")


def _meet(write: Writer, kernel: Matmul) -> None:
    """Adds the parts of the splits in the program that comes last, which goes on to the result."""
    with write.block("if SPLITS > 1:"):
        write(f"at = m[:, None] * {kernel.rows} + n[None, :]")
        write(f"keep = (m < rows)[:, None] & (n < {kernel.n})[None, :]")
        size = f"rows * {kernel.rows}"
        for i, name in enumerate(accumulators(kernel)):
            write(f"tl.store(part_ptr + part * {size} + at + {i * kernel.n}, {name}, mask=keep)")
        write("""
            tl.debug_barrier()
            ticket = tl.atomic_add(lock_ptr + strip, 1)
        """)
        with write.block("if ticket == SPLITS - 1:"):
            write("tl.store(lock_ptr + strip, 0)")
            _zero(write, kernel)
            with write.block("for i in range(SPLITS):"):
                for i, name in enumerate(accumulators(kernel)):
                    part = f"part_ptr + i * {size} + at + {i * kernel.n}"
                    write(f"{name} += tl.load({part}, mask=keep, other=0)")
            write_result(write, kernel)
    with write.block("else:"):
        write_result(write, kernel)


def _wide(write: Writer, kernel: Matmul) -> None:
    write(f"""
        across = tl.cdiv({kernel.n}, COLS)
        down = tl.cdiv(rows, ROWS)
    """)
    with write.block(
        "for tile in tl.range(tl.program_id(0), across * down, tl.num_programs(0), flatten=True):"
    ):
        write("""
            band = tile // (BAND * across)
            tall = tl.minimum(down - band * BAND, BAND)
            inside = tile % (BAND * across)
            strip = inside // tall
            m = (band * BAND + inside % tall) * ROWS + tl.arange(0, ROWS)
        """)
        _cols(write, kernel)
        write_prologue(write, kernel)
        _zero(write, kernel)
        with write.block(f"for step in range(tl.cdiv({kernel.k}, STEP)):"):
            write_step(write, kernel)
        write_result(write, kernel)
