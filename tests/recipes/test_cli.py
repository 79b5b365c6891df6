"""`sitsopt recipes`: the list, a page, the check of every recipe, the beginning of a new one."""

import json

import pytest
import torch
from transformers import LlamaConfig

from sitsopt.cli import recipes as verb
from sitsopt.spec.recipe import load_recipe


@pytest.fixture
def broken(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text("sumary: x\n")
    return tmp_path


def test_list(capsys):
    assert verb.recipes() == 0
    assert "llama      Llama family." in capsys.readouterr().out


def test_list_as_json(capsys):
    assert verb.recipes(as_json=True) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["llama"]["for"] == ["LlamaForCausalLM", "MistralForCausalLM"]
    assert rows["int4"]["overlay"]
    assert not rows["default"]["overlay"]


def test_a_page_says_who_set_what(capsys):
    assert verb.recipes("llama,int4") == 0
    out = capsys.readouterr().out
    assert "weights.0.group" in out
    assert "int4.yaml:4:" in out
    assert "asks for weights: ** in int4, group 64, 3 rounds, zero_point" in out


def test_a_page_as_json(capsys):
    assert verb.recipes("llama,int4", as_json=True) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["settings"]["weights"][0]["group"] == 64
    assert page["origins"]["profitability"].endswith("default.yaml:3:16")


def test_an_unknown_recipe(capsys):
    assert verb.recipes("lama") == 2
    assert "did you mean `llama`?" in capsys.readouterr().err
    assert verb.recipes("lama", as_json=True) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["hint"] == "did you mean `llama`?"


def test_every_shipped_recipe_passes(capsys):
    assert verb.test(as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] == []
    assert told["recipes"] == told["passed"] >= 12


def test_a_broken_one_fails(broken, capsys):
    assert verb.test(path=[broken]) == 1
    out = capsys.readouterr().out
    assert "mine: failed" in out
    assert "did you mean `summary`?" in out
    assert verb.test(path=[broken], as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["failed"][0]["id"] == "mine"


def test_a_path_that_is_wrong(tmp_path, capsys):
    assert verb.test(path=[tmp_path / "gone"]) == 2
    assert "no folder" in capsys.readouterr().err


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_new_recipe_loads(as_folder, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["MyForCausalLM"], "num_hidden_layers": 7}))
    out = tmp_path / "my.yaml"
    assert verb.new(str(tmp_path if as_folder else config), out=str(out)) == 0
    assert load_recipe(out).for_ == ["MyForCausalLM"]
    assert "7 in this model" in out.read_text()
    assert verb.new(str(config), out=str(out)) == 2
    assert "this file exists" in capsys.readouterr().err


def test_a_new_recipe_for_a_factory(capsys):
    assert verb.new("tests.recipes.test_cli:factory", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["for"] == ["Linear"]


def test_a_new_recipe_for_the_sample_and_for_a_gguf_file(capsys, monkeypatch):
    from sitsopt.measure import models

    def fake(spec, *_):
        asked.append(spec)
        config = LlamaConfig(num_hidden_layers=30)
        return models.Loaded(torch.nn.Linear(1, 1), None, "m", config, "gguf")

    asked = []
    monkeypatch.setattr(models, "load", fake)
    for spec in ("smollm2", "some/model.gguf"):
        assert verb.new(spec) == 0
        assert "30 in this model" in capsys.readouterr().out
    assert asked == ["smollm2", "some/model.gguf"]


@pytest.mark.slow
def test_a_new_recipe_for_the_packaged_model(capsys):
    assert verb.new("smollm2", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["for"] == ["LlamaForCausalLM"]
    assert "30 in this model" in told["text"]


def factory():
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize("model", ["no such model", "gone.json", "gone.gguf", "gone.module:f"])
def test_nothing_to_write_a_recipe_for(model, capsys):
    assert verb.new(model) == 2
    assert capsys.readouterr().err


def test_a_class_name_is_enough(capsys):
    assert verb.new("MyForCausalLM", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["for"] == ["MyForCausalLM"]
