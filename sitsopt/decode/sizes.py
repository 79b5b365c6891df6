"""Which sizes of a call are compiled: few, so that a new length of a prompt compiles nothing."""

from __future__ import annotations

PIECES = (512, 128, 32)  # tokens of one prefill call
BLOCKS = (4, 16, 64)  # rows of the smaller graphs that check a block
SMALLEST_CACHE = 256
SPARE = 32  # rows of a cache beyond the longest answer, for blocks that are checked at its end


def pieces(tokens: int) -> list[tuple[int, int]]:
    """A prompt as calls: (tokens, rows), the last one padded to a size that is compiled.

    Padded is less than a quarter of a piece of 512, half of one of 128, and what is missing to 32.
    """
    found = []
    while tokens > 0:
        rows = next(s for s, least in zip(PIECES, (385, 65, 1), strict=True) if tokens >= least)
        found.append((min(tokens, rows), rows))
        tokens -= rows
    return found


def block_rows(most: int) -> tuple[int, ...]:
    """Rows of the graphs that check a block: a token and up to `most` proposed after it. From 16 rows on multiples of
    16, in which kernels work: 16 proposals at most are 15, since a block of 17 costs more than the 17th brings."""
    largest = most + 1 if most < 16 else (most + 1) // 16 * 16
    return (*(size for size in BLOCKS if size < largest), largest)


def cache_length(tokens: int, limit: int | None = None) -> int:
    """Room of a cache for `tokens`: a power of two from 256, and `SPARE` rows more."""
    size = SMALLEST_CACHE
    while size < tokens:
        size *= 2
    return min(size, max(limit or size, tokens)) + SPARE
