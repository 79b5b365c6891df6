"""Rotary embedding as data (Su et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """x * cos + turned(x) * sin over heads of a fixed size.

    style: `half` pairs (i, i + D/2), `interleaved` pairs (2i, 2i + 1). rotary: how many leading channels
    turn; the others are copied. table: dtype of cos and sin, [.., T, rotary].
    """

    dtype: str
    head_dim: int
    style: str = "half"
    rotary: int = 0
    table: str = ""
    wide: bool = False

    family = "rope"

    @property
    def name(self) -> str:
        """The kernel's name."""
        part = f"_{self.turned}" if self.turned != self.head_dim else ""
        return f"rope_{self.style}_{self.dtype}_{self.head_dim}{part}"

    @property
    def turned(self) -> int:
        """How many channels turn."""
        return self.rotary or self.head_dim
