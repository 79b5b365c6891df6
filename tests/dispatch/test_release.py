"""`release: true`: originals go once they are packed, and whoever needs one is told how to have it back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sitsopt
from sitsopt.graph.released import Released, ReleasedError
from sitsopt.rewrite.wanted import is_linear
from tests.rules.test_stored import IDS, from_file
from tests.rules.test_weights import llama, rounded

INT8 = [{"match": "**", "scheme": "int8", "release": True}]


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()


def released(model):
    return {n for n, p in model.named_parameters() if type(p) is Released}


def optimized(model, weights=INT8, **more):
    more = {"profitability": "always", "lowering": "auto", **more}
    return sitsopt.optimize(model, "default", weights=weights, **more)


@pytest.mark.slow
@torch.no_grad()
def test_all_graphs_read_the_packed_copies():
    model = llama()
    want = rounded(model, "int8")
    optimized(model)
    for ids in (IDS, IDS[:, :1], IDS, IDS[:, :3]):
        torch.testing.assert_close(model(ids).logits, want(ids).logits, rtol=1e-4, atol=1e-5)
    names = {f"{n}.weight" for n, m in model.named_modules() if is_linear(m)}
    assert released(model) == names
    said = [e for e in sitsopt.report(model).record.effective if e.asked == "weights: release"]
    assert said[0].got == "15 weights given back, 0 kept"


@torch.no_grad()
def test_what_is_read_as_it_is_stays():
    """An embedding that is the head too."""
    model = llama(tie_word_embeddings=True)
    want = rounded(model, "int8")(IDS).logits
    optimized(model)
    for _ in range(2):
        torch.testing.assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-5)
    assert "model.embed_tokens.weight" not in released(model) and len(released(model)) == 14


TOUCHES = {
    "arithmetic": lambda m: m.lm_head.weight + 1,
    "eager forward": lambda m: m.lm_head(torch.ones(1, 32)),
    "write": lambda m: m.lm_head.weight.mul_(2),
    "values": lambda m: m.lm_head.weight.tolist(),
    "data": lambda m: m.lm_head.weight.data,
    "state_dict": lambda m: m.state_dict(),
    "deepcopy": copy.deepcopy,
    "dtype": lambda m: m.half(),
}


@torch.no_grad()
def test_a_touch_says_how_to_restore(tmp_path):
    model = llama()
    optimized(model)(IDS)
    touches = {**TOUCHES, "save": lambda m: m.save_pretrained(tmp_path)}
    for name, touch in touches.items():
        with pytest.raises(ReleasedError, match=r"sitsopt.restore\(model\)"):
            touch(model)
            pytest.fail(name)
    assert "Released((60, 32)" in repr(model.lm_head.weight)


@torch.no_grad()
def test_restored_from_the_packed_copies_or_a_state_dict():
    model = llama()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    want, logits = rounded(model, "int8"), llama()(IDS).logits
    optimized(model)
    first = model(IDS).logits
    sitsopt.restore(model)
    assert not released(model)
    torch.testing.assert_close(model.lm_head.weight, want.lm_head.weight)
    torch.testing.assert_close(model.forward(IDS).logits, first, rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(v).all() for v in model.state_dict().values())
    torch.testing.assert_close(model(IDS).logits, first, rtol=2e-3, atol=1e-3)
    other = optimized(llama())
    other(IDS)
    sitsopt.restore(other, state)
    assert all(torch.equal(v, state[k]) for k, v in other.state_dict().items())
    assert torch.equal(other.forward(IDS).logits, logits)


@torch.no_grad()
def test_a_replaced_weight_is_packed():
    model = llama()
    optimized(model)
    before = model(IDS).logits
    new = torch.randn(60, 32) * 0.02
    model.lm_head.weight = nn.Parameter(new, requires_grad=False)
    after = model(IDS).logits
    want = llama()
    want.lm_head.weight = nn.Parameter(new)
    torch.testing.assert_close(after, rounded(want, "int8")(IDS).logits, rtol=1e-4, atol=1e-5)
    assert not torch.equal(after, before)


@torch.no_grad()
def test_the_files_own_weights_are_released_too():
    model = from_file(tied=False)
    want = model(IDS).logits
    optimized(model, [{"match": "**", "scheme": "stored", "release": True}])
    for ids in (IDS, IDS):
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-5)
    assert len(released(model)) == 14 and "model.layers.1.mlp.up_proj.weight" not in released(model)
    sitsopt.restore(model)
    torch.testing.assert_close(model.forward(IDS).logits, want, rtol=1e-5, atol=1e-5)
