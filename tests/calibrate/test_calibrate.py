"""The verb on a small model: rounds that converge, a file that recipes find, stale and damaged ones that they do not."""

import json

import pytest
import torch

import sitsopt
from sitsopt import session
from sitsopt.calibrate import store
from sitsopt.calibrate.passes import blocks_of, lent, linears, put, weight_of
from sitsopt.cli import app
from sitsopt.graph.packed import unpack
from sitsopt.measure import calibrate
from sitsopt.measure.engines import SitsOptions
from sitsopt.measure.models import load

RECIPE = {
    "weights": [{"match": "**", "scheme": "int4", "group": 64, "zero_point": True, "rounds": 2}]
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path))
    session.clear()
    return tmp_path


def options(rounds=2, **more):
    return calibrate.CalibrateOptions(
        SitsOptions("auto,int4", set=tuple(f"weights.*.{k}={v}" for k, v in more.items())),
        rounds=rounds, tokens=2048, window=128,
    )  # fmt: skip


def effective(model):
    return [
        e
        for e in sitsopt.report(model).record.effective
        if "rounds" in e.asked or "bits" in e.asked
    ]


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


IDS = torch.arange(3, 35).view(1, -1) * 5 % 250


def test_closer_and_found(tiny_llama, home):
    loaded = load(str(tiny_llama), "f32")
    own = {n: m.weight for n, m in linears(loaded.model).items()}
    told = []
    result = calibrate.run(loaded, options(), told=lambda name, r: told.append((name, r.number)))
    (one,) = result["sets"]
    assert told[:2] == [("int4-g64-low", 0), ("int4-g64-low", 1)]
    assert one["kl"] < 0.5 * one["rounds"][0]["kl"]
    assert one["rounds"][1]["mae"] < one["rounds"][0]["mae"]
    assert all(
        m.weight is own[n] for n, m in linears(loaded.model).items()
    )  # nothing is left behind

    found, why = store.find(loaded.model, "int4-g64-low")
    assert found is not None and not why
    sitsopt.optimize(loaded.model, ["auto", RECIPE], lowering="eager")
    got = logits(loaded.model, IDS)
    (line,) = effective(loaded.model)
    assert line.got == f"calibrated ({len(own)} layers)" and str(found.path) in line.reason

    plain = load(str(tiny_llama), "f32").model
    from safetensors import safe_open

    with lent(plain, list(own)), safe_open(found.path, "pt") as file:
        for name, module in linears(plain).items():
            shape = weight_of(module).shape
            put(module, unpack(file.get_tensor(name), *shape, found.forms[name].layout))
        torch.testing.assert_close(got, logits(plain, IDS), rtol=1e-5, atol=1e-5)


def test_the_same_in_bf16(tiny_llama, home):
    calibrate.run(load(str(tiny_llama), "f32"), options(1))
    found, _ = store.find(load(str(tiny_llama), "bf16").model, "int4-g64-low")
    assert found is not None


def test_other_weights_are_stale(tiny_llama, home):
    loaded = load(str(tiny_llama), "f32")
    calibrate.run(loaded, options(1))
    sitsopt.optimize(loaded.model, ["auto", RECIPE], lowering="eager")
    logits(loaded.model, IDS)
    weight = loaded.model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_(1.5)
    with pytest.warns(UserWarning, match="no weight .* with these values"):
        changed = logits(loaded.model, IDS)
    assert changed.isfinite().all()
    found, why = store.find(loaded.model, "int4-g64-low")
    assert found is None and "other weights" in why
    other = load(str(tiny_llama), "f32").model
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    sitsopt.optimize(other, ["auto", RECIPE], lowering="eager")
    logits(other, IDS)
    (line,) = effective(other)
    assert line.got == "the nearest numbers" and "other weights" in line.reason


def test_without_and_damaged(tiny_llama, home):
    loaded = load(str(tiny_llama), "f32")
    assert store.find(loaded.model, "int4-g64-low") == (
        None, "int4-g64-low is not calibrated: `sitsopt calibrate` makes it"
    )  # fmt: skip
    result = calibrate.run(loaded, options(1))
    path = home / result["sets"][0]["file"]
    path.write_bytes(path.read_bytes()[:5000])
    found, why = store.find(loaded.model, "int4-g64-low")
    assert found is None and "damaged" in why


def test_strict_wants_all(tiny_llama, home):
    model = load(str(tiny_llama), "f32").model
    with pytest.raises(Exception, match="is not calibrated"):
        sitsopt.optimize(model, ["auto", RECIPE], strict=True, lowering="eager")


def test_a_budget_of_bits(tiny_llama, home):
    loaded = load(str(tiny_llama), "f32")
    result = calibrate.run(loaded, options(1, effective_bits=5.6))
    (one,) = result["sets"]
    assert one["name"] == "int4-g64-low@5.6" and 5.1 < one["bits"] <= 5.6
    assert {row["form"] for row in one["layers"]} == {"int4-g64-low", "int8"}
    recipe = {"weights": [{**RECIPE["weights"][0], "effective_bits": 5.6}]}
    sitsopt.optimize(loaded.model, ["auto", recipe], lowering="eager")
    logits(loaded.model, IDS)
    fired = {site.rule for g in sitsopt.report(loaded.model).record.graphs for site in g.sites}
    assert {"weights/int4", "weights/int8"} <= fired


def test_a_budget_starts_from_what_its_form_has(tiny_llama, home, monkeypatch):
    loaded = load(str(tiny_llama), "f32")
    calibrate.run(loaded, options(1))
    monkeypatch.setattr("sitsopt.calibrate.rounds.Walk", None)  # no second pass over the blocks
    (one,) = calibrate.run(loaded, options(1, effective_bits=5.6))["sets"]
    assert one["rounds"][1]["how"] == "compensated before"
    assert one["kl"] < 0.5 * one["rounds"][0]["kl"]
    assert {row["form"] for row in one["layers"]} == {"int4-g64-low", "int8"}


def test_kept_beside_the_recipe(home, tmp_path):
    mine = tmp_path / "mine"
    (mine / "recipes").mkdir(parents=True)
    (mine / "recipes" / "small.yaml").write_text("weights: [{match: '**', scheme: int4}]\n")
    for recipe, place in (("auto,small", mine), ("auto,int4", home)):
        sits = SitsOptions(recipe, path=(str(mine),))
        assert calibrate._home(calibrate.CalibrateOptions(sits)) == place


def test_too_small_a_budget(tiny_llama, home):
    with pytest.raises(calibrate.InputError, match="too few"):
        calibrate.run(load(str(tiny_llama), "f32"), options(1, effective_bits=4.1))


def test_interrupted_and_resumed(tiny_llama, home, monkeypatch):
    loaded = load(str(tiny_llama), "f32")
    whole = calibrate.run(loaded, options(2))["sets"][0]
    for file in home.rglob("int4*"):
        file.unlink()
    own = {n: m.weight for n, m in linears(loaded.model).items()}

    def stop(text):
        if "round 1: block 2" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate.run(loaded, options(2), say=stop)
    assert all(m.weight is own[n] for n, m in linears(loaded.model).items())
    assert store.find(loaded.model, "int4-g64-low")[0] is None
    assert not [f for f in home.rglob(".*") if "cache" not in f.name.lower() and f.is_file()]

    def no_round_0(text):
        assert "round 0" not in text

    again = calibrate.run(loaded, options(2), say=no_round_0)["sets"][0]
    for a, b in zip(whole["rounds"], again["rounds"], strict=True):
        assert a["kl"] == pytest.approx(b["kl"], rel=0.02)


def test_a_recipe_without_weights(tiny_llama, home):
    with pytest.raises(calibrate.InputError, match="packs no weights"):
        calibrate.run(load(str(tiny_llama), "f32"), calibrate.CalibrateOptions())


def test_command_line(tiny_llama, home, capsys, monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    arguments = [
        "calibrate",
        str(tiny_llama),
        "--tokens",
        "2048",
        "--rounds",
        "1",
        "--text",
        str(text),
    ]
    with pytest.raises(SystemExit) as done:
        app.main([*arguments, "--json"])
    assert done.value.code == 0
    result = json.loads(capsys.readouterr().out)
    assert [r["how"] for r in result["sets"][0]["rounds"]] == ["nearest", "compensated"]
    with pytest.raises(SystemExit) as done:
        app.main(arguments)
    out = capsys.readouterr().out
    assert done.value.code == 0 and "KL a token" in out and "kept in" in out


def test_blocks():
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    small = {
        "vocab_size": 50,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    assert [n for n, _ in blocks_of(BertModel(BertConfig(**small)))] == [
        "encoder.layer.0",
        "encoder.layer.1",
    ]
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=64, n_layer=2, n_head=2))
    assert [n for n, _ in blocks_of(gpt2)] == ["transformer.h.0", "transformer.h.1"]
    assert weight_of(gpt2.transformer.h[0].attn.c_attn).shape == (192, 64)
