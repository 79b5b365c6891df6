"""Delta debugging: the smallest set of items that still breaks something."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
Breaks = Callable[[Sequence[T]], bool]


def ddmin(items: Sequence[T], breaks: Breaks[T]) -> list[T]:
    """A subset of `items`, in their order, that breaks and stops breaking when any one item leaves it.

    `breaks(items)` must hold. Halves first, then ever finer: one culprit among n costs about
    2 log2(n) trials. No set is tried twice.
    """
    known: dict[tuple[int, ...], bool] = {tuple(range(len(items))): True}

    def fails(chosen: Sequence[int]) -> bool:
        key = tuple(chosen)
        if key not in known:
            known[key] = breaks([items[i] for i in key])
        return known[key]

    if fails(()):
        return []
    current, parts = list(range(len(items))), 2
    while len(current) > 1:
        parts = min(parts, len(current))
        smaller = _smaller(current, parts, fails)
        if smaller is not None:
            current, parts = smaller
        elif parts < len(current):
            parts *= 2
        else:
            break
    return [items[i] for i in current]


def ddmin_grouped(groups: Mapping[str, Sequence[T]], breaks: Breaks[T]) -> list[T]:
    """`ddmin` over whole groups, then over the items of those that remain: rules, then their sites."""

    def members(names: Sequence[str]) -> list[T]:
        return [item for name in names for item in groups[name]]

    names = ddmin(list(groups), lambda chosen: breaks(members(chosen)))
    return ddmin(members(names), breaks) if names else []


def _smaller(
    current: list[int], parts: int, fails: Callable[[Sequence[int]], bool]
) -> tuple[list[int], int] | None:
    """A part that fails alone, else all but one part, and how finely to cut it; None for neither."""
    chunks = _cut(current, parts)
    for chunk in chunks:
        if fails(chunk):
            return chunk, 2
    if parts == 2:  # all but one half is the other half
        return None
    for number in range(parts):
        rest = [i for j, chunk in enumerate(chunks) if j != number for i in chunk]
        if fails(rest):
            return rest, parts - 1
    return None


def _cut(items: list[int], parts: int) -> list[list[int]]:
    """`parts` consecutive pieces of nearly equal length."""
    edges = [len(items) * k // parts for k in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(edges)]
