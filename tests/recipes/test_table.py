"""Texts of recipes and what each means: a recipe, or an error at one place in words that help."""

from dataclasses import dataclass

import pytest

from sitsopt.spec.errors import SpecError
from sitsopt.spec.recipe import Recipe, dump, load_recipe

RULES = ["fuse/qkv", "fuse/rope", "fuse/swiglu", "weights/int4", "regions/decode"]


@dataclass(frozen=True)
class Err:
    """`path`, `line` and `column` of the error, and what its text must hold."""

    path: str
    line: int
    column: int
    has: tuple[str, ...]


def err(path, line, column, *has):
    return Err(path, line, column, has)


GOOD = [
    ("summary: x\n", {"summary": "x"}),
    ("for: [A, B]\n", {"for": ["A", "B"]}),
    ("exclude: {fuse/rope: slow here}\n", {"exclude": {"fuse/rope": "slow here"}}),
    ("exclude: {fuse/*: none of them}\n", {"exclude": {"fuse/*": "none of them"}}),
    ("include:\n  fuse/qkv: only this\n", {"include": {"fuse/qkv": "only this"}}),
    ("profitability: always\n", {"profitability": "always"}),
    ("expect: {fuse/qkv: 30}\n", {"expect": {"fuse/qkv": 30}}),
    ("expect: {fuse/qkv: '>= 2 * n + 1'}\n", {"expect": {"fuse/qkv": ">= 2 * n + 1"}}),
    ("speculate: {draft: 'model:tiny'}\n", {"speculate": {"draft": "model:tiny"}}),
    (
        "kv_cache: {policy: recency, window: 64}\n",
        {"kv_cache": {"policy": "recency", "window": 64}},
    ),
    ("regions: {use: [decode]}\n", {"regions": {"use": ["decode"]}}),
    ("hooks: null\n", {}),
    ("weights: []\n", {"weights": []}),
    (
        "weights:\n- {match: a, scheme: int8, release: true}\n",
        {"weights": [{"match": "a", "scheme": "int8", "release": True}]},
    ),
]

BAD = [
    ("- a\n", err("", 1, 1, "no map of keys")),
    ("summary: x\nsummary: y\n", err("", 2, 1, "summary", "lines 1 and 2")),
    ("hooks:\n  cpu: {}\n  cpu: {}\n", err("", 3, 3, "cpu", "lines 2 and 3")),
    ("sumary: x\n", err("sumary", 1, 1, "did you mean `summary`")),
    ("summary: ''\n", err("summary", 1, 10, "not empty")),
    ("for: LlamaForCausalLM\n", err("for", 1, 6, "a list")),
    ("extends: nowhere\n", err("", 1, 10, "no recipe `nowhere`")),
    ("extends: lama\n", err("", 1, 10, "did you mean `llama`")),
    ("extends: [a]\n", err("extends", 1, 10, "no name")),
    ("exclude: {fuse/rope: }\n", err("exclude.fuse/rope", 1, 11, "a reason")),
    ("exclude: {fuse/rope: ''}\n", err("exclude.fuse/rope", 1, 22, "not empty")),
    ("exclude: [fuse/rope]\n", err("exclude", 1, 10, "a map")),
    ("exclude: {fuse/rop: x}\n", err("exclude.fuse/rop", 1, 11, "did you mean `fuse/rope`")),
    ("exclude: {fusion/*: x}\n", err("exclude.fusion/*", 1, 11, "no rule")),
    ("include: {fuse/qvk: x}\n", err("include.fuse/qvk", 1, 11, "did you mean `fuse/qkv`")),
    ("expect: {fuse/qk: 3}\n", err("expect.fuse/qk", 1, 10, "did you mean `fuse/qkv`")),
    ("expect: {fuse/qkv: 1.5}\n", err("expect.fuse/qkv", 1, 20, "a whole number")),
    ("expect: {fuse/qkv: }\n", err("expect.fuse/qkv", 1, 10, "a count")),
    ("expect: {fuse/qkv: 'n +'}\n", err("expect.fuse/qkv", 1, 21, "no expression")),
    ("expect:\n  fuse/qkv: '>= f(n)'\n", err("expect.fuse/qkv", 2, 17, "`f(n)` may not stand")),
    ("expect: {fuse/qkv: n ** 9}\n", err("expect.fuse/qkv", 1, 20, "may not stand")),
    (
        "exclude: {fuse/qkv: no}\nexpect: {fuse/qkv: 1}\n",
        err("expect.fuse/qkv", 2, 10, "expected and excluded"),
    ),
    ("weights: [{scheme: int4}]\n", err("weights[0].match", 1, 11, "`match` is missing")),
    ("weights: [{match: a}]\n", err("weights[0]", 1, 11, "neither `scheme` nor `skip`")),
    ("weights: [{match: a, skip: }]\n", err("weights[0]", 1, 11, "neither `scheme` nor `skip`")),
    (
        "weights:\n- match: a\n  scheme: int4\n  skip: why\n",
        err("weights[0].skip", 4, 9, "both `scheme` and `skip`"),
    ),
    (
        "weights: [{match: a, skip: why, group: 64}]\n",
        err("weights[0].group", 1, 40, "skipped take no settings"),
    ),
    ("weights: [{match: a, scheme: int5}]\n", err("weights[0].scheme", 1, 30, "fp8, int8, int4")),
    (
        "weights: [{match: a, scheme: int4, group: 0}]\n",
        err("weights[0].group", 1, 43, "8 or more"),
    ),
    (
        "weights: [{match: a, scheme: int4, group: '64'}]\n",
        err("weights[0].group", 1, 43, "a whole number"),
    ),
    (
        "weights: [{match: a, scheme: fp8, zero_point: true}]\n",
        err("weights[0].zero_point", 1, 47, "fp8 has no zero point"),
    ),
    ("weights: [{match: a..b, scheme: int4}]\n", err("weights[0].match", 1, 21, "empty segment")),
    (
        "weights: [{match: 're:(', scheme: int4}]\n",
        err("weights[0].match", 1, 23, "regular expression"),
    ),
    (
        "weights:\n- {match: a, scheme: int4}\n- {match: a, scheme: fp8}\n",
        err("weights[1].match", 3, 11, "stands twice"),
    ),
    ("group_0: 64\n", err("group_0", 1, 1, "unknown key")),
    ("group: 64\n", err("group", 1, 1, "belongs under `weights[]`")),
    ("kv_cache: {window: 8}\n", err("kv_cache.policy", 1, 11, "`policy` is missing")),
    ("kv_cache: {policy: hot}\n", err("kv_cache.policy", 1, 20, "hotness-aware")),
    (
        "kv_cache: {policy: hotness-aware, hot_budget: 2}\n",
        err("kv_cache.hot_budget", 1, 47, "1 or less"),
    ),
    (
        "kv_cache: {policy: recency, hot_budget: 0.1}\n",
        err("kv_cache.hot_budget", 1, 41, "means nothing to `recency`"),
    ),
    ("kv_cache: {policy: recency, bits: 3}\n", err("kv_cache.bits", 1, 35, "4, 8")),
    ("speculate: {draft: lookup}\n", err("speculate.draft", 1, 20, "prompt-lookup")),
    ("speculate: {draft: 'model:'}\n", err("speculate.draft", 1, 21, "no model")),
    (
        "speculate: {draft: prompt-lookup, acceptance: typical}\n",
        err("speculate.acceptance", 1, 47, "exact"),
    ),
    ("regions: {use: decode}\n", err("regions.use", 1, 16, "a list")),
    ("regions: {use: [decode], require: 95}\n", err("regions.require", 1, 35, "1 or less")),
    ("regions: {use: [decod]}\n", err("regions.use[0]", 1, 17, "did you mean `decode`")),
    ("hooks: {cpu: {aply: true}}\n", err("hooks.cpu.aply", 1, 15, "did you mean `apply`")),
    ("hooks: {cpu: {apply: yes}}\n", err("hooks.cpu.apply", 1, 22, "write true or false")),
    ("hooks: {gpu: {}}\n", err("hooks.gpu", 1, 9, "unknown key")),
    ("profitability: mesure\n", err("profitability", 1, 16, "did you mean `measure`")),
]


def attempt(folder, text):
    file = folder / "recipe.yaml"
    file.write_text(text)
    return load_recipe(file, rule_ids=RULES)


@pytest.mark.parametrize(("text", "settings"), GOOD)
def test_reads(text, settings, tmp_path):
    recipe = attempt(tmp_path, text)
    assert recipe.as_dict() == settings
    assert recipe == Recipe.model_validate(settings)
    assert attempt(tmp_path, dump(recipe)) == recipe


@pytest.mark.parametrize(("text", "wanted"), BAD)
def test_refuses(text, wanted, tmp_path):
    with pytest.raises(SpecError) as caught:
        attempt(tmp_path, text)
    error = caught.value
    assert error.pos.file == str(tmp_path / "recipe.yaml")
    assert (error.path, error.line, error.column) == (wanted.path, wanted.line, wanted.column)
    for part in wanted.has:
        assert part in str(error)


def test_every_mistake_is_told_at_once(tmp_path):
    with pytest.raises(SpecError) as caught:
        attempt(tmp_path, "sumary: x\nprofitability: mesure\nweights: [{match: a, scheme: int5}]\n")
    assert [error.line for error in caught.value.errors] == [1, 2, 3]


def test_null_takes_back_the_default(tmp_path):
    assert attempt(tmp_path, "profitability: null\n").profitability == "measure"
