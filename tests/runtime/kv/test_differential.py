"""The cache against a list of vectors, over random histories."""

from __future__ import annotations

import pytest

from .differential import Case


@pytest.mark.parametrize("seed", range(24))
def test_a_cache_is_a_list_of_vectors(seed: int) -> None:
    Case(seed).run(12)


@pytest.mark.slow
def test_ten_thousand_operations() -> None:
    for seed in range(1000, 1400):
        Case(seed).run(25)
