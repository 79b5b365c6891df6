"""Matrix products for GPUs as data: x @ weight^T with what may stand before and after."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = ("", "i8", "i4", "f8e4m3")
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh", "tanh", "sigmoid")


@dataclass(frozen=True)
class Matmul:
    """y[M, n] = x[M, k] @ weight[n, k]^T, accumulated in f32 and rounded once.

    weight: how the weights are kept, empty for x's own dtype. group: k's that share a scale (int4; fp8
    with 128 has scales for blocks of 128 x 128); 0 for one scale a row. low: int4 with zero points.
    inputs: `i8` or `f8e4m3` when x is quantized too, one f32 scale a row.
    norm: x is normalised first (rms), times a gain; offset, round_first: as in `Rowwise`.
    gated: the weight has 2n rows, y = act(first half) * second half. skinny: up to 16 rows, k split over
    programs; otherwise persistent programs over tiles of y.
    """

    dtype: str
    n: int
    k: int
    weight: str = ""
    group: int = 0
    low: bool = False
    inputs: str = ""
    norm: bool = False
    offset: float = 0.0
    round_first: bool = True
    bias: bool = False
    act: str = ""
    gated: bool = False
    residual: bool = False
    skinny: bool = True
    native_fp8: bool = True

    family = "matmul"

    @property
    def name(self) -> str:
        """The kernel's name."""
        parts = ["skinny" if self.skinny else "wide", self.dtype, f"{self.n}x{self.k}"]
        if self.weight:
            parts += [f"w_{self.weight}" + (f"_{self.group}" if self.group else "")]
        parts += ["low"] * self.low + [f"x_{self.inputs}"] * bool(self.inputs)
        flags = ("norm", "bias", "gated", "residual")
        parts += [flag for flag in flags if getattr(self, flag)] + [self.act] * bool(self.act)
        parts += ["offset"] * bool(self.offset) + ["late"] * (self.norm and not self.round_first)
        return "matmul_" + "_".join(parts)

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.n * (2 if self.gated else 1)
