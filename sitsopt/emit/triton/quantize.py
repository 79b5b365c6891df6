"""Kernel text that rounds f32 values to int8 or fp8 (e4m3, as in OCP FP8) and reads them back.

Where a target has no fp8 (sm_80), its bytes are made and read with integer arithmetic.
"""

from __future__ import annotations

from .source import Writer

# Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even, for |x| < 2^22.
_MAGIC = "12582912.0"


def write_int8(write: Writer, out: str, value: str, low: int = -127, high: int = 127) -> None:
    """out: the nearest integer of `value`, clamped."""
    write(f"{out} = ({value} + {_MAGIC}) - {_MAGIC}")
    write(f"{out} = tl.minimum(tl.maximum({out}, {float(low)}), {float(high)}).to(tl.int8)")


def write_fp8(write: Writer, out: str, value: str, native: bool) -> None:
    """out: the nearest e4m3 value, ties to even, saturated at 448; NaN stays NaN (an e4m3 or its byte)."""
    write(
        f"{out} = tl.where({value} != {value}, {value}, tl.minimum(tl.maximum({value}, -448.0), 448.0))"
    )
    if native:
        write(f"{out} = {out}.to(tl.float8e4nv)")
        return
    # Below 2^-6 the step is 2^-9: a sum with 2^14 * 1.5 has it as its last bit.
    write(f"""
        bits = {out}.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        small = ((tl.abs({out}) + 24576.0) - 24576.0) * 512.0
        even = (bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)
        body = tl.where(tl.abs({out}) < 0.015625, small.to(tl.int32), (even >> 20) - (120 << 3))
        body = tl.where({out} != {out}, 0x7F, body)
        {out} = (sign | body).to(tl.uint8)
    """)


def write_row_scale(write: Writer, out: str, largest: str, limit: float) -> None:
    """out: what a row is divided by so that its largest value becomes `limit`; 1 for a row of zeros."""
    write(f"{out} = tl.where({largest} == 0.0, 1.0, {largest} / {limit})")


def read_fp8(value: str, dtype: str, native: bool) -> str:
    """The e4m3 elements of `value` in a float dtype; `value` holds bytes unless native."""
    if native:
        return f"{value}.to({dtype})"
    # As an f16 with its exponent in place the value is 2^8 too small; byte 0x7f is NaN.
    word = f"((({value}.to(tl.int16) & 0x80) << 8) | (({value}.to(tl.int16) & 0x7F) << 7))"
    half = f"({word}.to(tl.float16, bitcast=True) * 256.0)"
    nan = f'tl.where(({value} & 0x7F) == 0x7F, float("nan"), {half})'
    return f"{nan}.to({dtype})"
