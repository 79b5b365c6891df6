"""Every recipe that is shipped: it loads, says what it is for, and asks for nothing unproved."""

import pytest

from sitsopt.spec.locate import files
from sitsopt.spec.recipe import Recipe, dump, family, load_recipe, requests

NAMES = sorted(files("recipes"))
OVERLAYS = ["fp8", "int4", "int4-kv", "int8", "speculate", "stored"]
FAMILIES = {
    "llama": ["LlamaForCausalLM", "MistralForCausalLM"],
    "gemma3": ["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
    "qwen": ["Qwen2ForCausalLM", "Qwen3ForCausalLM"],
    "gpt2": ["GPT2LMHeadModel"],
    "bert": ["BertModel", "BertForMaskedLM", "BertForSequenceClassification"],
    "resnet": ["ResNetForImageClassification"],
}


def test_all_are_there():
    assert sorted(["default", *OVERLAYS, *FAMILIES]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_loads_and_says_what_it_is(name):
    recipe = load_recipe(name)
    assert isinstance(recipe, Recipe)
    assert recipe.name == name
    assert recipe.summary
    assert bool(recipe.for_) == (name in FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_survives_being_written_out(name, tmp_path):
    recipe = load_recipe(name)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(recipe))
    assert load_recipe(copy) == recipe


@pytest.mark.parametrize("name", ["default", *FAMILIES])
def test_a_family_asks_for_no_change_of_numbers(name):
    sections = {request.section for request in requests(load_recipe(name))}
    assert sections <= {"profitability"}


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_overlay_goes_on_every_family(name, overlay):
    base, both = load_recipe(name), load_recipe(f"{name},{overlay}")
    assert both.expect == base.expect
    assert both.for_ == base.for_
    assert {r.section for r in requests(both)} - {r.section for r in requests(base)}


@pytest.mark.parametrize(
    ("name", "one"), [(name, one) for name, classes in FAMILIES.items() for one in classes]
)
def test_auto_finds_the_family(name, one):
    assert family([one, "PreTrainedModel", "Module"]) == name
    assert load_recipe("auto", [one]).name == name
    assert family(["MyOwn" + one, one]) == name


def test_auto_without_a_family_is_default():
    assert load_recipe("auto", ["SomethingElse", "Module"]).name == "default"
    assert load_recipe("auto").name == "default"


def test_the_contract_example_reads():
    recipe = load_recipe(
        {
            "weights": [
                {"match": "lm_head", "skip": "27 % of the answers go through it"},
                {"match": "model.layers.*", "scheme": "int4", "group": 64, "zero_point": True},
            ],
            "exclude": {"fuse/rope": "reason"},
            "kv_cache": {
                "policy": "hotness-aware", "window": 512, "sinks": 4,
                "fallback_threshold": 0.75, "hot_budget": 0.02,
            },
            "speculate": {"draft": "prompt-lookup", "max_tokens": 16, "acceptance": "exact"},
            "regions": {"use": ["decode"], "require": 0.95},
            "hooks": {"cpu": {}, "nvlink": {"apply": False}},
            "profitability": "measure",
            "expect": {"fuse/qkv": "num_hidden_layers"},
        }
    )  # fmt: skip
    assert recipe.excluded("fuse/rope") == "reason"
    assert recipe.excluded("fuse/qkv") is None
    assert [request.asked for request in requests(recipe)] == [
        "weights: model.layers.* in int4, group 64, zero_point",
        "kv_cache: hotness-aware, bits 4, window 512, sinks 4, hot_budget 0.02, "
        "fallback_threshold 0.75, max_seq_len 8192",
        "speculate: prompt-lookup, max_tokens 16, acceptance exact, entropy_ratio 0.3",
        "regions: decode",
        "regions: require 0.95",
        "hooks: cpu, applied",
        "hooks: nvlink, planned",
        "profitability: measure",
    ]
