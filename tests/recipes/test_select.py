"""Which modules a pattern means: boundaries between segments are never crossed."""

import pytest

from sitsopt.spec.errors import Pos, SpecError
from sitsopt.spec.select import select

NAMES = [
    "mlp.gate", "mlp.gate_proj", "mlp.gate_up_proj", "layers.1.x", "layers.10.x", "lm_head",
    "my_lm_head2", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj",
    "model.layers.1.attn.q_proj", "model.layers.10.attn.k_proj", "model.norm",
]  # fmt: skip
CLASSES = {
    "": ["Model", "Module"],
    "lm_head": ["Linear", "Module"],
    "model.layers.1.attn": ["SelfAttention", "Attention", "Module"],
    "model.layers.10.attn": ["CrossAttention", "Attention", "Module"],
    "model.layers.1.attn.q_proj": ["Linear", "Module"],
}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("mlp.gate", ["mlp.gate"]),
        ("mlp.gate_*", ["mlp.gate_proj", "mlp.gate_up_proj"]),
        ("mlp", ["mlp.gate", "mlp.gate_proj", "mlp.gate_up_proj"]),
        ("layers.1", ["layers.1.x"]),
        ("layers.1.x", ["layers.1.x"]),
        ("layers.1*", ["layers.1.x", "layers.10.x"]),
        ("layers.?", ["layers.1.x"]),
        ("layers.[0-9][0-9]", ["layers.10.x"]),
        ("layers.[!2]", ["layers.1.x"]),
        ("lm_head", ["lm_head"]),
        ("*lm_head*", ["lm_head", "my_lm_head2"]),
        ("model.layers.*", NAMES[7:11]),
        ("model.layers.1", ["model.layers.1.attn.q_proj"]),
        ("model.*", NAMES[7:]),
        ("model.**.q_proj", ["model.layers.1.attn.q_proj"]),
        ("**.mlp.gate", ["mlp.gate", "model.layers.0.mlp.gate"]),
        ("**.gate", ["mlp.gate", "model.layers.0.mlp.gate"]),
        ("**", NAMES),
        ("*", NAMES),
        (r"re:.*\.layers\.1\..*", ["model.layers.1.attn.q_proj"]),
        (r"re:lm_head", ["lm_head"]),
        (r"re:.*(q|k)_proj", ["model.layers.1.attn.q_proj", "model.layers.10.attn.k_proj"]),
        ("class:SelfAttention", ["model.layers.1.attn.q_proj"]),
        ("class:Attention", ["model.layers.1.attn.q_proj", "model.layers.10.attn.k_proj"]),
        ("class:Linear", ["lm_head", "model.layers.1.attn.q_proj"]),
        ("class:Model", NAMES),
    ],
)
def test_selects(pattern, expected):
    assert select(NAMES, pattern, CLASSES) == expected


@pytest.mark.parametrize(
    ("pattern", "problem", "column", "hint"),
    [
        ("model.layer.*", "selects no module", 7, "did you mean `model.layers.*`?"),
        ("mlp.gate_pro", "selects no module", 7, "did you mean `mlp.gate_proj`?"),
        ("attn.q_proj", "selects no module", 7, "write `**.attn.q_proj`"),
        ("layers.0.mlp", "selects no module", 7, "write `**.layers.0.mlp`"),
        ("re:q_proj", "selects no module", 7, "must match a whole name"),
        ("class:SelfAttentoin", "selects no module", 7, "did you mean `SelfAttention`?"),
        ("re:(q", "not a regular expression", 10, ""),
        ("a..b", "an empty segment", 9, ""),
        ("", "an empty segment", 7, ""),
        ("a.b**", "`**` inside the segment", 9, ""),
        ("model layers", "` ` in `model layers`", 12, "re:"),
        ("a.(b|c)", "`(` in", 9, "re:"),
        ("class:a.b", "is no class name", 7, ""),
    ],
)
def test_refuses(pattern, problem, column, hint):
    with pytest.raises(SpecError) as caught:
        select(NAMES, pattern, CLASSES, pos=Pos("recipe.yaml", 3, 7))
    assert problem in caught.value.problem
    assert (caught.value.pos.line, caught.value.pos.column) == (3, column)
    assert hint in caught.value.hint


def test_keeps_the_order_of_the_names():
    assert select(["b", "a", "c"], "[ab]") == ["b", "a"]
