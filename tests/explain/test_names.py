from __future__ import annotations

import pytest

from sitsopt.explain.names import alike, collapse, micros, ranges, short, size, tidy, where


def test_collapse_one_number() -> None:
    assert collapse(f"model.layers.{i}.mlp" for i in range(30)) == ["model.layers.{0..29}.mlp"]


def test_collapse_several_numbers_as_a_product() -> None:
    paths = [f"stage{s}.{b}.conv{c}" for s in (1, 2, 3) for b in (0, 1) for c in (1, 2)]
    assert collapse(paths) == ["stage{1..3}.{0,1}.conv{1,2}"]


def test_collapse_says_how_often_a_module_occurs() -> None:
    paths = ["m.0", *["m.1", "m.1"], *["m.2", "m.2"], "norm"]
    assert collapse(paths) == ["m.0", "norm", "m.{1,2} ×2"]


def test_collapse_keeps_what_is_no_product_apart() -> None:
    assert collapse(["a.0.x", "a.1.y", "b"]) == ["a.0.x", "a.1.y", "b"]
    assert collapse([""]) == [""]
    assert collapse([]) == []


def test_where_is_one_line() -> None:
    assert where([""]) == "the model itself"
    assert where("abcdef") == "a, b, c and 3 more"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "3"), ([0, 1], "{0,1}"), ([0, 1, 2, 7], "{0..2,7}"), ([1, 3], "{1,3}")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "?"), (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (-2048, "-2.0 kB"), (999_999, "1.0 MB"),
     (3.2e12, "3.2 TB"), (9.9e16, "99000 TB")],
)  # fmt: skip
def test_size(count: float | None, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("time", "text"), [(None, "?"), (1.234, "1.23 us"), (4500, "4.5 ms"), (2e6, "2 s")]
)
def test_micros(time: float | None, text: str) -> None:
    assert micros(time) == text


def test_sources_are_short(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short("/x/lib/python3.11/site-packages/transformers/a.py:3") == "transformers/a.py:3"
    assert short(f"{tmp_path}/own/model.py:7") == "own/model.py:7"
    assert short("/else/model.py:7") == "/else/model.py:7"


def test_node_numbers_do_not_tell_misses_apart() -> None:
    assert alike("mul_12 = aten.mul.Tensor") == alike("mul_7 = aten.mul.Tensor")
    assert alike("D = 80") != alike("D = 96")
    assert tidy("arg4_1 = arg4_1") == "an input of the graph"
