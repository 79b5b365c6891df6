"""Rowwise kernels as data: norms and softmax over the last dimension, with what may stand before and after."""

from __future__ import annotations

from dataclasses import dataclass

OPS = ("rms_norm", "layer_norm", "softmax")


@dataclass(frozen=True)
class Rowwise:
    """One pass over rows of a fixed length, computed in f32.

    residual: a second input is added first, the rounded sum is an output too.
    weight, bias: dtypes of the gain and the shift, empty for none. offset: added to the gain.
    round_first: the normalised value is rounded to the row's dtype before the gain.
    quantize: `i8` or `f8e4m3`: the output is quantized, its f32 scale per row an output of its own.
    """

    op: str
    dtype: str
    size: int
    residual: bool = False
    weight: str = ""
    bias: str = ""
    offset: float = 0.0
    round_first: bool = True
    quantize: str = ""
    wide: bool = False
    native_fp8: bool = True

    family = "rowwise"

    @property
    def name(self) -> str:
        """The kernel's name; equal kernels have equal names, unlike ones within a model have unlike ones."""
        parts = ["add"] * self.residual + [self.op, self.dtype, str(self.size)]
        parts += [f"offset{self.offset:g}".replace(".", "p").replace("-", "m")] * bool(self.offset)
        parts += ["late"] * (self.op == "rms_norm" and not self.round_first)
        parts += [f"bias_{self.bias}"] * bool(self.bias) + [self.quantize] * bool(self.quantize)
        return "_".join(parts)
