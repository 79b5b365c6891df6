"""`expect:` counts over the model's own config, parsed and never run."""

from types import SimpleNamespace

import pytest

from sitsopt.spec.errors import Pos, SpecError
from sitsopt.spec.expect import expectation

CONFIG = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "depths": [3, 4, 6, 3],
    "hidden_act": "silu",
    "tie": True,
    "vision_config": {"num_hidden_layers": 12},
}
POS = Pos("r.yaml", 5, 10)


def holds(text, count, config=CONFIG):
    return expectation("fuse/qkv", text, POS).holds(count, config)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        (30, 30, (True, "30")),
        (30, 29, (False, "30")),
        ("30", 30, (True, "30")),
        ("num_hidden_layers", 30, (True, "30 (num_hidden_layers)")),
        (">= num_hidden_layers", 31, (True, ">= 30 (num_hidden_layers)")),
        (">=num_hidden_layers", 29, (False, ">= 30 (num_hidden_layers)")),
        ("<= 3", 4, (False, "<= 3")),
        ("> 3", 4, (True, "> 3")),
        ("< 3", 2, (True, "< 3")),
        ("== 3", 3, (True, "3")),
        ("2 * num_hidden_layers + 1", 61, (True, "61 (2 * num_hidden_layers + 1)")),
        ("(num_hidden_layers - 2) // 4 % 5", 2, (True, "2 ((num_hidden_layers - 2) // 4 % 5)")),
        (">= 2 * sum(depths) + len(depths)", 36, (True, ">= 36 (2 * sum(depths) + len(depths))")),
        ("max(depths)", 6, (True, "6 (max(depths))")),
        ("-num_hidden_layers + 31", 1, (True, "1 (-num_hidden_layers + 31)")),
        (
            "vision_config.num_hidden_layers",
            12,
            (True, "12 (vision_config.num_hidden_layers)"),
        ),
    ],
)
def test_holds(text, count, expected):
    assert holds(text, count) == expected


@pytest.mark.parametrize("config", [CONFIG, SimpleNamespace(**CONFIG)], ids=["map", "object"])
def test_a_name_that_does_not_exist(config):
    with pytest.raises(SpecError) as caught:
        holds(">= num_hiden_layers", 3, config)
    assert "did you mean `num_hidden_layers`?" in str(caught.value)
    assert caught.value.column == POS.column + len(">= ")
    assert caught.value.path == "expect.fuse/qkv"


def test_the_text_part_of_a_larger_config_counts():
    config = {"text_config": CONFIG, "hidden_size": 3}
    assert holds("num_hidden_layers", 30, config)[0]
    assert holds("hidden_size", 3, config)[0]
    with pytest.raises(SpecError, match="did you mean `num_hidden_layers`"):
        holds("num_hidden_layer", 3, config)


def test_a_config_that_renames():
    config = SimpleNamespace(n_layer=12, attribute_map={"num_hidden_layers": "n_layer"})
    config.num_hidden_layers = 12
    assert holds("num_hidden_layers", 12, config)[0]


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("", 0), ("n +", 3), ("n n", 2), ("f(n)", 0), ("n.__class__", 0), ("n[0]", 0), ("'a'", 0),
        ("1.5", 0), ("True", 0), ("n ** 2", 0), ("n / 2", 0), ("a and b", 0), ("[1]", 0), ("sum()", 0),
        ("sum(x for x in y)", 0), ("lambda: 1", 0), ("len(a, key=b)", 0), ("(1).real", 0), ("~1", 0),
        (">= >= 3", 3), ("=> 3", 0), ("n if n else 1", 0), ("n := 1", 2), ("1" * 300, 0), ("!= 3", 0),
    ],
)  # fmt: skip
def test_refuses(text, column):
    with pytest.raises(SpecError) as caught:
        expectation("fuse/qkv", text, POS)
    assert caught.value.line == POS.line
    assert POS.column <= caught.value.column <= POS.column + max(len(text), 1)


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("hidden_act", "a whole number"),
        ("depths", "a whole number"),
        ("tie", "a whole number"),
        ("depths * 1000000000", "whole numbers"),
        ("hidden_act * 1000000000", "whole numbers"),
        ("num_hidden_layers // 0", "cannot be computed"),
        ("len(num_hidden_layers)", "cannot be computed"),
    ],
)
def test_what_is_no_count(text, has):
    with pytest.raises(SpecError) as caught:
        holds(text, 3)
    assert has in str(caught.value)
