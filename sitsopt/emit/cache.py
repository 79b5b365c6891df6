"""Writing a key/value cache as data: rotated keys appended, whole tiles quantized and packed."""

from __future__ import annotations

from dataclasses import dataclass

from .attention import TILE


@dataclass(frozen=True)
class Append:
    """One pass over new tokens: q and k rotated (half style), k and v stored at their positions.

    table: dtype of cos and sin. page: tokens a page of the cache, 0 for none.
    """

    dtype: str
    head_dim: int
    value_dim: int
    table: str = ""
    page: int = 0
    wide: bool = False

    family = "cache_write"

    @property
    def name(self) -> str:
        """The kernel's name."""
        page = f"_page{self.page}" if self.page else ""
        return f"cache_append_{self.dtype}_{self.head_dim}x{self.value_dim}{page}"


@dataclass(frozen=True)
class Commit:
    """One pass over tiles of keys and values: quantized as `FlashAttention` reads them, packed, stored.

    rope: keys come unrotated and are rotated on the way, for the prefill of whole tiles.
    """

    dtype: str
    head_dim: int
    value_dim: int
    cache: str
    rope: bool = False
    table: str = ""

    family = "cache_write"
    tile = TILE

    @property
    def name(self) -> str:
        """The kernel's name."""
        rope = "_rope" if self.rope else ""
        return f"cache_commit_{self.dtype}_{self.head_dim}x{self.value_dim}_{self.cache}{rope}"
