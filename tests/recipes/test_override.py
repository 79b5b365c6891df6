"""`--set PATH=VALUE` changes one value and is checked as the file is."""

import pytest

from sitsopt.spec.errors import SpecError
from sitsopt.spec.recipe import load_recipe

BASE = {
    "weights": [
        {"match": "lm_head", "skip": "why"},
        {"match": "a", "scheme": "int4", "group": 64},
        {"match": "b", "scheme": "int8"},
    ],
    "hooks": {"cpu": {}},
    "kv_cache": {"policy": "recency"},
    "exclude": {"fuse/rope": "slow"},
}


def load(*overrides, base=BASE):
    return load_recipe(base, overrides=overrides)


def test_a_star_reaches_every_entry_that_takes_settings():
    assert [weight.group for weight in load("weights.*.group=128").weights] == [None, 128, 128]


def test_a_number_reaches_one():
    assert [weight.group for weight in load("weights.1.group=32").weights] == [None, 32, None]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("profitability=always", lambda r: r.profitability == "always"),
        ("hooks.nvlink.apply=false", lambda r: r.hooks.nvlink.apply is False),
        ("hooks.nvlink={apply: false}", lambda r: r.hooks.nvlink.apply is False),
        ("hooks.cpu=null", lambda r: r.hooks.cpu is None),
        ("kv_cache.window=9", lambda r: r.kv_cache.window == 9),
        ("kv_cache=null", lambda r: r.kv_cache is None),
        ("speculate.draft=prompt-lookup", lambda r: r.speculate.max_tokens == 16),
        ("exclude.fuse/qkv=for a test", lambda r: r.exclude["fuse/qkv"] == "for a test"),
        ("exclude.fuse/rope=null", lambda r: r.exclude == {}),
        ("expect.fuse/qkv=>= 3", lambda r: r.expect["fuse/qkv"] == ">= 3"),
        ("weights=[{match: c, scheme: fp8}]", lambda r: r.weights[0].scheme == "fp8"),
        ("weights.2.match=a.b", lambda r: r.weights[2].match == "a.b"),
        ("summary=a=b", lambda r: r.summary == "a=b"),
        (" kv_cache.window = 5", lambda r: r.kv_cache.window == 5),
    ],
)
def test_sets(text, read):
    assert read(load(text))


def test_the_last_one_wins():
    assert load("kv_cache.window=1", "kv_cache.window=2").kv_cache.window == 2


@pytest.mark.parametrize(
    ("text", "column", "has"),
    [
        ("weigths.*.group=64", 1, "did you mean `weights`?"),
        ("weights.*.groupp=64", 11, "did you mean `group`?"),
        ("weights.*.group=sixty", 17, "a whole number"),
        ("weights.*.group= 0", 18, "8 or more"),
        ("weights.9.group=64", 9, "a number from 0 to 2"),
        ("weights.x.group=64", 9, "`x` is no item"),
        ("weights.*.group", 1, "PATH=VALUE"),
        ("=64", 1, "PATH=VALUE"),
        ("weights..group=64", 9, "an empty part"),
        ("weights.*.group=", 17, "no value"),
        ("*.group=1", 1, "items of a list"),
        ("hooks.nvlnk.apply=true", 7, "did you mean `nvlink`?"),
        ("hooks.nvlink.apply=no", 20, "write true or false"),
        ("kv_cache.policy.x=1", 10, "one of hotness-aware"),
        ("kv_cache.policy=[", 18, "not valid YAML"),
        ("profitability=mesure", 15, "did you mean `measure`?"),
        ("profitabilty=measure", 1, "did you mean `profitability`?"),
        ("weights.0.group=64", 17, "skipped take no settings"),
        ("expect.fuse/qkv=n +", 17, "no expression"),
        ("speculate.*.draft=x", 1, "no list `speculate`"),
        ("kv_cache.hot_budget=0.5", 21, "means nothing to `recency`"),
    ],
)
def test_refuses_at_the_place_of_the_mistake(text, column, has):
    with pytest.raises(SpecError) as caught:
        load(text)
    error = getattr(caught.value, "errors", [caught.value])[0]
    assert error.pos.file == f"--set {text}"
    assert (error.line, error.column) == (1, column)
    assert has in str(error)


def test_nothing_to_reach():
    with pytest.raises(SpecError, match="takes settings"):
        load("weights.*.group=64", base={"weights": [{"match": "a", "skip": "b"}]})
    with pytest.raises(SpecError, match="no list `weights`"):
        load("weights.*.group=64", base={})
