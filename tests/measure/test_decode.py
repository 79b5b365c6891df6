from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sitsopt.measure import text
from sitsopt.measure.decode import Decoder, static_cache
from sitsopt.measure.engines import SitsOptions, check_names, compiled, torch_engine
from sitsopt.measure.errors import InputError
from sitsopt.measure.models import Loaded, load


@pytest.fixture(scope="module")
def loaded(tiny_llama: Path) -> Loaded:
    return load(str(tiny_llama), "f32", device="cpu")


def test_the_loop_decodes_what_generate_does(loaded: Loaded):
    ids = text.context_for(loaded, 20)
    want = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=9,
        min_new_tokens=9,
        do_sample=False,
    )
    decoder = Decoder(loaded.model, loaded.model, 32)
    for _ in range(2):  # the second run starts from a cache that the first one filled
        run = decoder.run(ids, 8)
        assert run.tokens == want[0, 20:].tolist()
        assert run.prefill_s > 0 and run.decode_s > 0
    assert list(decoder.stream(ids, set()))[:9] == run.tokens
    assert list(decoder.stream(ids, {run.tokens[0]})) == []


def test_a_compiled_call_compiles_two_graphs_and_no_more(loaded: Loaded):
    torch._dynamo.reset()
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    call = torch.compile(loaded.model, backend=backend, dynamic=False)
    decoder = Decoder(loaded.model, call, 32)
    ids = text.context_for(loaded, 20)
    for _ in range(3):
        run = decoder.run(ids, 4)
    for row in text.prompts(loaded.tokenizer, 2, 20):
        decoder.step(decoder.prefill(row.view(1, -1)))
    assert len(graphs) == 2
    assert run.tokens == Decoder(loaded.model, loaded.model, 32).run(ids, 4).tokens


def test_too_long_a_context_is_refused(loaded: Loaded):
    with pytest.raises(InputError, match="300 tokens are more than the model's 256"):
        static_cache(loaded.model, 300)


def test_a_model_without_a_cache_is_refused():
    class Plain(torch.nn.Linear):
        config = None

    with pytest.raises(InputError, match="Plain takes no cache"):
        Decoder(Plain(2, 2), lambda: None, 8)


def test_unknown_engines_are_named():
    check_names(["eager", "sits", "sits:auto,int4", "llama.cpp"])
    with pytest.raises(InputError, match="unknown engine `vllm`: one of eager"):
        check_names(["vllm"])


def test_options_of_the_backend_are_only_what_was_said():
    assert SitsOptions().as_options() == {"recipe": "auto"}
    given = SitsOptions("auto,int4", "cpu", ("a=1",), ("x",), {"only": ["k"]}).as_options()
    assert given == {
        "recipe": "auto,int4", "target": "cpu", "set": ["a=1"], "path": ["x"], "only": ["k"],
    }  # fmt: skip


def test_settings_are_told(loaded: Loaded):
    assert compiled("eager", loaded, SitsOptions())[1] == "the model as it is"
    assert "module guards off" in compiled("inductor", loaded, SitsOptions())[1]
    assert "recipe=default" in compiled("sits:default", loaded, SitsOptions())[1]
    assert torch_engine("eager", loaded, 16).name == "eager"
