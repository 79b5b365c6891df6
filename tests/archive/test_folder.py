"""Quantized folders, written here as each format's own tools write them, read back as models."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sitsopt.graph.archived import open_for
from sitsopt.graph.packed import lay_out, unpack
from sitsopt.measure.errors import InputError
from sitsopt.measure.models import load
from tests.backend.support import graphs, sits

AWQ_PACK = [0, 2, 4, 6, 1, 3, 5, 7]  # which column the nibbles of a word hold


def words(numbers, bits, order=None):
    """Unsigned numbers [.., n] as int32 [.., n * bits / 32]."""
    per = 32 // bits
    split = numbers.long().unflatten(-1, (-1, per))
    split = split if order is None else split[..., order]
    total = (split << (torch.arange(per) * bits)).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def rounded(w, bits, group, symmetric):
    """Unsigned numbers [N, K], scales [N, groups] and unsigned zero points."""
    grouped = w.unflatten(1, (-1, group))
    top = (1 << bits) - 1
    if symmetric:
        scale = (grouped.abs().amax(2) / (1 << bits - 1)).half()
        zero = torch.full_like(scale, 1 << bits - 1)
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = ((high - low) / top).half()
        zero = torch.round(-low / scale.float()).clamp(1, top)
    q = torch.round(grouped / scale.float()[..., None] + zero[..., None].float()).clamp(0, top)
    plain = (q - zero[..., None].float()) * scale.float()[..., None]
    return q.flatten(1).int(), scale, zero.int(), plain.flatten(1)


def gptq(w, bits, group=32, symmetric=False):
    q, scale, zero, plain = rounded(w, bits, group, symmetric)
    order = torch.arange(w.shape[1], dtype=torch.int32) // group
    parts = {
        "qweight": words(q, bits).t().contiguous(), "qzeros": words(zero.t() - 1, bits),
        "scales": scale.t().contiguous(), "g_idx": order,
    }  # fmt: skip
    return parts, plain, {"quant_method": "gptq", "bits": bits}


def awq(w, bits=4, group=64):
    q, scale, zero, plain = rounded(w, 4, group, False)
    parts = {
        "qweight": words(q.t(), 4, AWQ_PACK), "qzeros": words(zero.t(), 4, AWQ_PACK),
        "scales": scale.t().contiguous(),
    }  # fmt: skip
    return parts, plain, {"quant_method": "awq", "bits": 4}


def compressed_packed(w, bits=4, group=32, symmetric=True):
    q, scale, zero, plain = rounded(w, bits, group, symmetric)
    parts = {
        "weight_packed": words(q, bits), "weight_scale": scale,
        "weight_shape": torch.tensor(w.shape),
    }  # fmt: skip
    if not symmetric:
        parts["weight_zero_point"] = words(zero.t().contiguous(), bits).t().contiguous()
    return parts, plain, {"quant_method": "compressed-tensors"}


def compressed_int8(w):
    scale = (w.abs().amax(1, keepdim=True) / 127).bfloat16()
    q = torch.round(w / scale.float()).clamp(-128, 127)
    settings = {"quant_method": "compressed-tensors"}
    return {"weight": q.to(torch.int8), "weight_scale": scale}, q * scale.float(), settings


def compressed_fp8(w, per):
    n, k = w.shape
    blocks = (-(-n // 128), -(-k // 128))
    count = {"tensor": (1,), "row": (n, 1), "block": blocks}[per]
    scale = (torch.rand(count) + 0.5) * 1e-3
    wide = scale.expand(n, 1) if per != "block" else scale.repeat_interleave(128, 0)[:n]
    wide = wide.repeat_interleave(128, 1)[:, :k] if per == "block" else wide
    q = (w / wide).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if per == "block" else "weight_scale"
    settings = {"quant_method": "fp8" if per == "block" else "compressed-tensors"}
    return {"weight": q, name: scale}, q.float() * wide, settings


def raw(w, group=32):
    grouped = w.unflatten(1, (-1, group))
    scale = grouped.abs().amax(2, keepdim=True)
    zero = grouped.amin(2, keepdim=True) / scale
    step = (grouped.amax(2, keepdim=True) / scale - zero) / 15
    q = torch.round((grouped / scale - zero) / step).clamp(0, 15)
    head = torch.cat([scale, zero, step], 2).contiguous().view(torch.uint8)
    nibbles = q.to(torch.uint8)
    body = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    plain = (scale * (zero + step * q)).flatten(1)
    return {"raw": torch.cat([head, body], 2)}, plain, {"quant_method": "raw"}


FORMS = {
    "gptq4": lambda w: gptq(w, 4), "gptq8": lambda w: gptq(w, 8, 64, True),
    "gptq4 row": lambda w: gptq(w, 4, w.shape[1]),
    "gptq4 symmetric": lambda w: gptq(w, 4, 32, True), "awq": awq, "w4a16": compressed_packed,
    "w4a16 zero": lambda w: compressed_packed(w, symmetric=False),
    "w8a16": lambda w: compressed_packed(w, 8, 64), "int8": compressed_int8,
    "fp8 tensor": lambda w: compressed_fp8(w, "tensor"),
    "fp8 row": lambda w: compressed_fp8(w, "row"),
    "fp8 block": lambda w: compressed_fp8(w, "block"), "raw": raw,
}  # fmt: skip
EXACT = ("gptq4 symmetric", "gptq4 row", "gptq8", "w4a16", "w8a16", "int8", "fp8 tensor", "fp8 row")


def quantized(tiny_llama, folder, form):
    """The tiny model with its layers in a form; what each layer stands for."""
    folder.mkdir()
    for file in tiny_llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    state, plain = load_file(folder / "model.safetensors"), {}
    for name in [n for n in state if "_proj" in n]:
        layer = name.removesuffix(".weight")
        parts, plain[name], settings = FORMS[form](state.pop(name).float())
        state |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return plain


@pytest.mark.parametrize("form", FORMS)
def test_layers_are_what_the_folder_says(tiny_llama, tmp_path, form):
    plain = quantized(tiny_llama, tmp_path / "m", form)
    model = load(str(tmp_path / "m"), "f32", device="cpu").model
    found = open_for(model)
    assert set(found) == set(plain)
    for name, entry in found.items():
        n, k = entry.shape
        weight, want = model.get_parameter(name), plain[name]
        packed = lay_out(entry.read(0, n), entry.layout)
        assert torch.equal(unpack(packed, n, k, entry.layout), weight)
        if form in EXACT:
            assert torch.equal(weight, want)
        assert (weight - want).norm() <= 1e-3 * want.norm()  # a lowest value is kept in f16
        assert torch.equal(entry.values(5, 13), weight[5:13])


def test_what_has_no_packed_form_is_refused(tiny_llama, tmp_path):
    quantized(tiny_llama, tmp_path / "m", "gptq4")
    file = tmp_path / "m" / "model.safetensors"
    state = load_file(file)
    name = "model.layers.0.mlp.up_proj.g_idx"
    state[name] = state[name].flip(0).contiguous()
    save_file(state, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"up_proj has its inputs in another order \(desc_act\)"):
        load(str(tmp_path / "m"), "f32", device="cpu")


@pytest.mark.slow
@torch.no_grad()
def test_a_folder_is_packed_as_it_is(tiny_llama, tmp_path):
    quantized(tiny_llama, tmp_path / "m", "w4a16")
    model = load(str(tmp_path / "m"), "f32", device="cpu").model
    ids = torch.arange(7)[None]
    compiled = sits(model, recipe="auto,stored", lowering="auto")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    sites = [s for g in graphs(model) for s in g.sites if s.rule == "weights/int4"]
    assert len(sites) == 14 and all(s.weight_error == 0 for s in sites)
