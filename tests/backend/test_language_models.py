"""Language models: generation runs the compiled model, on any cache, and the model stays what it was."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sitsopt
from sitsopt.runtime import kernels
from sitsopt.spec.errors import SpecError
from tests.backend.support import fired, graphs, raised, sits
from tests.rules.models import build, call, static_cache

IDS = torch.randint(3, 60, (2, 5))
LLAMA = {"fuse/qkv", "fuse/gate_up", "fuse/rms_norm"}


def tokens(run: Any, **kwargs: Any) -> torch.Tensor:
    return run.generate(
        IDS, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(IDS), **kwargs
    )


@pytest.fixture
def model() -> nn.Module:
    return build("llama")


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_of_the_compiled_object(model: nn.Module, cache: str | None) -> None:
    kwargs = {"cache_implementation": cache} if cache else {}
    wanted = tokens(model, **kwargs)
    run = sits(model)
    assert torch.equal(tokens(run, **kwargs), wanted)
    assert fired(model) >= LLAMA
    count = len(graphs(model))
    assert torch.equal(tokens(run, **kwargs), wanted)
    if cache:
        assert len(graphs(model)) == count  # nothing is compiled again
    assert model._compiled_call_impl is None  # the model inside is as it was


def test_generate_after_compile_in_place(model: nn.Module) -> None:
    wanted = tokens(model)
    model.compile(backend="sits", options={"lowering": "eager"})
    assert torch.equal(tokens(model), wanted)
    assert fired(model) >= LLAMA


def test_generate_of_another_backend_is_untouched(model: nn.Module) -> None:
    run = torch.compile(model, backend="eager")
    assert torch.equal(tokens(run), tokens(model))
    assert not graphs(model)


def test_generate_fails_as_it_would(model: nn.Module) -> None:
    run = sits(model)
    with pytest.raises(ValueError):
        run.generate(IDS, max_new_tokens=-1, attention_mask=torch.ones_like(IDS))
    assert model._compiled_call_impl is None
    error = raised(lambda: tokens(sits(model, recipe="lama")))
    assert isinstance(error, SpecError)
    assert model._compiled_call_impl is None


def test_generate_from_two_threads(model: nn.Module) -> None:
    run, wanted = sits(model), tokens(model)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(tokens(run))) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 2 and all(torch.equal(f, wanted) for f in found)
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_logits_and_caches(attn: str, phase: str) -> None:
    model = build("llama", attn)
    (args, kwargs), (twins, others) = call(model, phase), call(model, phase)
    run = sits(model)
    with torch.no_grad():
        wanted = model(*twins, **others).logits
        torch.testing.assert_close(run(*args, **kwargs).logits, wanted, rtol=1e-4, atol=1e-4)
    for a, b in zip(
        kwargs["past_key_values"].layers, others["past_key_values"].layers, strict=True
    ):
        torch.testing.assert_close((a.keys, a.values), (b.keys, b.values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, attn", [("llama", "eager"), ("gemma2", "sdpa")])
def test_written_out_attention_has_the_kernel(name: str, attn: str) -> None:
    """Gemma 2 caps its scores, which torch's attention cannot."""
    model = build(name, attn, layers=1)
    (args, kwargs), (twins, others) = call(model, "decode"), call(model, "decode")
    run = sits(model, "auto", set="profitability=always")
    with torch.no_grad():
        wanted = model(*twins, **others).logits
        torch.testing.assert_close(run(*args, **kwargs).logits, wanted, rtol=1e-4, atol=1e-4)
    (site,) = [s for g in graphs(model) for s in g.sites if s.rule == "attention/gqa"]
    assert site.lowered == ("cpp" if kernels.availability()[0] else "inductor")


def test_decode_through_the_compiler(model: nn.Module) -> None:
    """Kernels, writes to the cache in place, and one compiled graph for every step."""
    run = sits(model, "auto")
    with torch.no_grad():
        caches = [static_cache(model, 16, batch=1) for _ in range(2)]
        ids = IDS[:1]
        for step in range(4):
            a = run(ids, past_key_values=caches[0], use_cache=True).logits
            b = model(ids, past_key_values=caches[1], use_cache=True).logits
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
            ids = b[:, -1:].argmax(-1)
            if step == 1:
                count = len(graphs(model))
    assert len(graphs(model)) == count == 2
    for g in graphs(model):
        assert not g.fallback
    for a, b in zip(*(c.layers for c in caches), strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-3, atol=1e-3)


def test_training_a_language_model(model: nn.Module) -> None:
    found = []
    for run in (model, sits(model)):
        model.zero_grad()
        run(IDS, labels=IDS).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def test_the_whole_recipe(model: nn.Module, tmp_path: Path) -> None:
    wanted, keys = tokens(model, cache_implementation="static"), list(model.state_dict())
    before = copy.deepcopy(model.state_dict())
    assert sitsopt.optimize(model, lowering="eager") is model
    assert torch.equal(tokens(model), wanted)
    assert fired(model) >= LLAMA
    assert list(model.state_dict()) == keys
    assert all(torch.equal(model.state_dict()[k], before[k]) for k in keys)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_bad_recipe_is_refused_at_once(model: nn.Module) -> None:
    with pytest.raises(SpecError, match="lama"):
        sitsopt.optimize(model, "lama")
    with pytest.raises(SpecError, match="expct"):
        sitsopt.optimize(model, expct={})
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "qwen3"])
def test_other_families(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        torch.testing.assert_close(sits(model)(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert fired(model)
