"""Attention for GPUs as data: grouped queries over a cache that may be quantized or paged."""

from __future__ import annotations

from dataclasses import dataclass

CACHES = ("", "i8", "i4")
TILE = 64  # keys that share one scale per channel in a quantized cache


@dataclass(frozen=True)
class FlashAttention:
    """Softmax(q k^T) v without the scores ever in memory (Dao et al., 2022; split keys: Dao et al., 2023).

    The rows of a program are (token, query head) pairs of one kv head, heads fastest.

    group: query heads a kv head. cache: how k and v are kept. page: tokens a page, 0 for none.
    causal: key j is seen by token t when j <= t + diagonal; window: only when j > t + diagonal - window.
    mask: `i1` (true attends) or the dtype of an additive mask. bounds: first and last key of each sequence.
    splits: keys are shared out over programs, `Merge` joins the parts. mass: also the log of the softmax
    mass of every tile of keys. empty: what a row that attends nothing yields, `zero` or `nan`.
    """

    dtype: str
    head_dim: int
    value_dim: int
    group: int
    cache: str = ""
    page: int = 0
    causal: bool = False
    window: bool = False
    softcap: bool = False
    mask: str = ""
    alibi: bool = False
    bounds: bool = False
    sinks: bool = False
    splits: bool = False
    mass: bool = False
    empty: str = "zero"
    wide: bool = False

    family = "attention"

    @property
    def name(self) -> str:
        """The kernel's name, every choice in it."""
        size = str(self.head_dim)
        if self.value_dim != self.head_dim:
            size += f"x{self.value_dim}"
        parts = ["decode" if self.splits else "prefill", self.dtype, size, f"g{self.group}"]
        parts += [f"kv_{self.cache}"] * bool(self.cache) + [f"page{self.page}"] * bool(self.page)
        flags = ("causal", "window", "softcap", "alibi", "bounds", "sinks", "mass", "wide")
        parts += [flag for flag in flags if getattr(self, flag)]
        parts += [f"mask_{self.mask}"] * bool(self.mask) + ["nan"] * (self.empty == "nan")
        return "attention_" + "_".join(parts)

    @property
    def halves(self) -> bool:
        """Whether a byte holds two channels, i (low four bits) and i + D/2."""
        return self.cache == "i4"


@dataclass(frozen=True)
class Merge:
    """Joins the parts of a split attention: a softmax over log-sum-exps."""

    dtype: str
    value_dim: int
    group: int
    sinks: bool = False
    empty: str = "zero"

    family = "attention"

    @property
    def name(self) -> str:
        """The kernel's name."""
        parts = [self.dtype, str(self.value_dim), f"g{self.group}"]
        parts += ["sinks"] * self.sinks + ["nan"] * (self.empty == "nan")
        return "attention_merge_" + "_".join(parts)
