"""The table of all schemes: figures of a small model, kept beside the page, filled up by a bench."""

import json

import pytest

from sitsopt import session
from sitsopt.measure import calibrate, schemes
from sitsopt.measure.engines import SitsOptions
from sitsopt.measure.models import load


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path / "cache"))
    session.clear()
    return tmp_path


def test_a_page(tiny_llama, home):
    loaded = load(str(tiny_llama), "f32")
    options = calibrate.CalibrateOptions(
        SitsOptions("auto,int4"), rounds=1, tokens=2048, window=128
    )
    calibrate.run(loaded, options)
    model, target = str(tiny_llama), home / "page.md"
    schemes.main([model, "--write", str(target), "--tokens", "1024"])
    table = json.loads((home / "page.json").read_text())[model]
    assert list(table) == ["eager", *(name for name, _, _ in schemes.ROWS)]
    assert table["int4"]["calibrated"] == "calibrated (15 layers)"
    assert table["int4"]["kl"] < 0.5 * table["int4, nearest"]["kl"]
    assert table["int8"]["kl"] < 0.1 * table["fp8, nearest"]["kl"]
    assert 8 < table["int8"]["bits"] < 9
    assert table["int4, 4.75 bits"]["calibrated"].startswith("the nearest numbers")
    assert "| int8 | " in target.read_text()

    bench = home / "bench.json"
    figures = {"decode_tps": 77.0, "prefill_tps": 400.0, "peak_mb": 120.0}
    engines = {"eager": figures, "sits:auto,int8": figures | {"decode_tps": 99.0}}
    bench.write_text(json.dumps({"engines": engines}))
    schemes.main([model, "--write", str(target), "--bench", str(bench)])
    again = json.loads((home / "page.json").read_text())[model]
    assert again["int8"]["decode_tps"] == 99.0 and again["int8"]["kl"] == table["int8"]["kl"]
    assert "| 99 | 400 | 120 |" in target.read_text()


def test_without_logits_it_is_cosine():
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = BertModel(config).eval()
    rows = torch.arange(40).view(2, 20)
    gauge = schemes._Gauge(model, rows)
    assert gauge.row(32, None)["value"] == pytest.approx(1)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.mul_(-10)
    changed = gauge.row(8, "no")
    assert changed["measure"] == "cosine" and changed["value"] < 0.999 and changed["kl"] is None
