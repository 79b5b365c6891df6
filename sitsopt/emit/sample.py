"""Choosing the next token as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Argmax:
    """The index of the largest logit of each row; the first of equal ones; NaN counts as largest."""

    dtype: str
    family = "sample"

    @property
    def name(self) -> str:
        """The kernel's name."""
        return f"argmax_{self.dtype}"


@dataclass(frozen=True)
class Draw:
    """One draw from softmax(logits / temperature) cut by top-k, then by top-p, without a sort.

    Both cuts keep everything that equals the last value kept.
    """

    dtype: str
    family = "sample"

    @property
    def name(self) -> str:
        """The kernel's name."""
        return f"draw_{self.dtype}"
