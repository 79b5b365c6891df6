"""bf16 in Triton's interpreter made to mean what it means on a GPU.

As of triton 3.9 the interpreter keeps bf16 as 16-bit integers, rounds f32 to it by cutting, takes integers for
its bits, and multiplies those in `tl.dot`. Here: round to nearest even, and a dot of the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as f32 values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """f32 values as bf16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16).reshape(values.shape)


def repair() -> None:
    """Replaces the two builder methods, once a process."""
    builder: Any = interpreter.InterpreterBuilder
    cast, dot, handle = builder.cast_impl, builder.create_dot, interpreter.TensorHandle

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        came, wanted = src.dtype.scalar, dst_type.scalar
        if came == wanted or tl.bfloat16 not in (came, wanted):
            return cast(self, src, dst_type)
        if wanted == tl.bfloat16:
            return handle(narrow(src.data.astype(np.float32)), wanted)
        return cast(self, handle(widen(src.data), tl.float32), dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        wide = [
            handle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        ]
        return dot(self, *wide, d, *options)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
