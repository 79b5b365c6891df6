"""Dims of a pattern against dims of a graph: one that does not exist matches nothing."""

from __future__ import annotations

import pytest

from sitsopt.graph.opview import front, permutation


@pytest.mark.parametrize(("dim", "rank", "found"), [(-1, 3, 2), (2, 3, 2), (3, 3, 3), (-4, 3, -4)])
def test_counted_from_the_front(dim: int, rank: int, found: int):
    assert front(dim, rank) == found


@pytest.mark.parametrize(
    ("op", "args", "rank", "order"),
    [
        ("aten.transpose", (1, 2), 4, (0, 2, 1, 3)),
        ("aten.transpose", (1, 2), 2, None),
        ("aten.transpose", (-3, -1), 2, None),
        ("aten.permute", ([0, 2, 1],), 3, (0, 2, 1)),
        ("aten.permute", ([0, 2, 4],), 3, None),
        ("aten.permute", ([0, 1],), 3, None),
    ],
)
def test_permutation(op, args, rank, order):
    assert permutation(op, rank, args) == order
