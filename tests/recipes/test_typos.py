"""One letter of one key dropped, added or swapped, anywhere in a recipe: the error names the real key."""

import copy
import random
import string

import pytest

from sitsopt.spec.errors import SpecError
from sitsopt.spec.recipe import load_recipe

RULES = [
    "fold/norm_linear",
    "fold/scale_linear",
    "fuse/qkv",
    "fuse/rope",
    "fuse/swiglu",
    "fuse/add_rms_norm",
    "regions/decode",
]
VALID = {
    "summary": "x",
    "for": ["A"],
    "extends": "default",
    "include": {"fuse/qkv": "y", "fuse/swiglu": "y"},
    "exclude": {"fuse/rope": "z"},
    "weights": [
        {"match": "b", "skip": "why"},
        {
            "match": "a", "scheme": "int4", "group": 64, "zero_point": True, "rounds": 2,
            "release": True,
        },
    ],
    "kv_cache": {
        "policy": "hotness-aware", "bits": 4, "window": 512, "sinks": 4, "fallback_threshold": 0.7,
        "hot_budget": 0.02, "max_seq_len": 100,
    },
    "speculate": {"draft": "prompt-lookup", "max_tokens": 4, "acceptance": "exact"},
    "regions": {"use": ["decode"], "require": 0.5},
    "hooks": {
        "cpu": {"apply": True}, "hbm": {"apply": True}, "nvlink": {"apply": False}, "streams": {},
    },
    "profitability": "model",
    "expect": {"fuse/qkv": 3},
}  # fmt: skip


def walk(data, path=()):
    """Every key with the path of the map that holds it."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield path, key
            yield from walk(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from walk(value, (*path, index))


def typos(key):
    """Each letter dropped, one added at each place, each two neighbours swapped."""
    letters = random.Random(key)
    for at in range(len(key)):
        yield key[:at] + key[at + 1 :]
        yield key[:at] + letters.choice(string.ascii_lowercase) + key[at:]
        yield key[:at] + key[at : at + 2][::-1] + key[at + 2 :]


def with_typo(path, key, typo):
    data = copy.deepcopy(VALID)
    inside = data
    for part in path:
        inside = inside[part]
    inside[typo] = inside.pop(key)
    return data


def test_the_recipe_without_a_typo_is_right():
    load_recipe(VALID, rule_ids=RULES)


@pytest.mark.parametrize(
    ("path", "key"), list(walk(VALID)), ids=lambda part: str(part).replace("/", "-")
)
def test_the_error_names_the_real_key(path, key):
    siblings = VALID
    for part in path:
        siblings = siblings[part]
    tried = 0
    for typo in typos(key):
        if typo in siblings or typo in RULES or not typo:
            continue
        tried += 1
        with pytest.raises(SpecError) as caught:
            load_recipe(with_typo(path, key, typo), rule_ids=RULES)
        assert f"`{typo}`" in str(caught.value), typo
        assert key in str(caught.value), typo
    assert tried >= 3


def test_a_misplaced_key_is_told_where_it_belongs():
    data = copy.deepcopy(VALID)
    data["weights"][1]["window"] = 3
    with pytest.raises(SpecError) as caught:
        load_recipe(data)
    assert caught.value.path == "weights[1].window"
    assert "belongs under `kv_cache`" in caught.value.hint
