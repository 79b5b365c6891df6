"""Packed weights in whole models: which layers, right values, never stale, said plainly."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from sitsopt.graph.packed import Layout, nearest, round_inputs
from sitsopt.reporting import report
from sitsopt.rewrite.wanted import is_linear
from sitsopt.runtime.weights import _shared, revived, share
from sitsopt.session import sessions_of
from sitsopt.spec.errors import SpecError
from tests.backend.support import Mlp, graphs, raised, sits

SETTINGS = {
    "int8": ({"scheme": "int8"}, ("int8", 0, False, "")),
    "int4": ({"scheme": "int4", "group": 16, "zero_point": True}, ("int4", 16, True, "")),
    "fp8": ({"scheme": "fp8", "per": "block"}, ("fp8", 128, False, "block")),
}


def packing(model, weights, **options):
    return sits(model, recipe=["default", {"weights": weights}], **options)


def rounded(model, scheme, names=None):
    """A copy whose linear layers hold what the packed weights stand for; nothing is tied any more."""
    other = copy.deepcopy(model)
    for name, module in other.named_modules():
        if is_linear(module) and (names is None or name in names):
            weight = module.weight.detach()
            plain = weight if isinstance(module, nn.Linear) else weight.t()
            plain = nearest(plain, *SETTINGS[scheme][1])
            module.weight = nn.Parameter(plain if isinstance(module, nn.Linear) else plain.t())
    return other


def packed_sites(model):
    return [s for g in graphs(model) for s in g.sites if s.rule.startswith("weights/")]


def llama(**more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 60}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **more)).eval()


IDS = torch.arange(6)[None]


@pytest.mark.parametrize("scheme", SETTINGS)
@torch.no_grad()
def test_a_language_model_computes_with_rounded_weights(scheme):
    model = llama(tie_word_embeddings=True)
    want = rounded(model, scheme)(IDS).logits  # its embedding is the model's own
    compiled = packing(model, [{"match": "**", **SETTINGS[scheme][0]}])
    torch.testing.assert_close(compiled(IDS).logits, want, rtol=1e-4, atol=1e-5)
    sites = packed_sites(model)
    assert {s.rule for s in sites} == {f"weights/{scheme}"} and len(sites) == 15
    assert {s.place.module for s in sites} >= {"lm_head", "model.layers.1.self_attn.k_proj"}
    head = next(s for s in sites if s.place.module == "lm_head")
    assert head.bytes_before == 4 * (6 * 32 + 60 * 32 + 6 * 60)  # the model's own traffic
    assert all(0 < s.weight_error < 0.2 for s in sites)
    if scheme != "fp8":  # 32 inputs do not fill a block of 128
        assert all(s.bytes_after < s.bytes_before for s in sites)


@torch.no_grad()
def test_kernels_run_it_and_graphs_share_the_weights():
    model = llama()
    compiled = packing(model, [{"match": "**", "scheme": "int8"}], lowering="auto")
    want = rounded(model, "int8")
    for ids in (IDS, IDS[:, :1]):
        torch.testing.assert_close(compiled(ids).logits, want(ids).logits, rtol=1e-4, atol=1e-5)
    first, second = graphs(model)
    assert {s.lowered for s in packed_sites(model)} <= {"cpp", "inductor"}
    merged = [s for s in first.sites if s.rule in ("fuse/qkv", "fuse/gate_up")]
    assert {s.lowered for s in merged} == {packed_sites(model)[0].lowered}
    assert len(packed_of(model)) == 15 and len(second.sites) == len(first.sites)


def packed_of(model):
    """The packed weights that the store holds for a model's parameters."""
    from sitsopt.runtime.weights import _STORE

    own = {id(p) for p in model.parameters()}
    return [f for f in _STORE.values() if any(id(ref()) in own for ref in f.sources)]


def test_a_graph_from_disk_shares_them_too():
    """Nodes have other names there."""
    graph, weight = Graph(), nn.Parameter(torch.randn(16, 16))
    node = graph.call_function(
        torch.ops.sits.pack.default, (graph.placeholder("p0"), *SETTINGS["int8"][1], "")
    )
    node.name = "pack_7"
    graph.output(node)
    module = GraphModule({}, graph)
    here = _shared(module, [weight])
    again = revived(*pickle.loads(pickle.dumps((module, [0], True))))
    share([again], [weight])
    assert again.folded is here
    share([again], [nn.Parameter(weight)])
    assert again.folded is not here


@torch.no_grad()
def test_a_weight_that_another_rule_folded_is_packed_folded():
    """The last norm's gain goes into the head, and the head into 8 bits."""
    model = llama()
    compiled = sits(model, recipe={"weights": [{"match": "lm_head", "scheme": "int8"}]})
    logits, want = compiled(IDS).logits, model(IDS).logits
    assert {s.rule for g in graphs(model) for s in g.sites} >= {"fold/norm_linear", "weights/int8"}
    assert 0 < (logits - want).norm() < 0.02 * want.norm()


@torch.no_grad()
def test_settings_by_name_the_first_match_wins():
    model = llama()
    weights = [
        {"match": "lm_head", "skip": "the head decides"},
        {"match": "model.layers.*.self_attn.k_proj", "skip": "keys"},
        {"match": "model.layers.*", "scheme": "int8"},
    ]
    compiled = packing(model, weights)
    names = {n for n, m in model.named_modules() if is_linear(m)}
    names = {n for n in names if n != "lm_head" and "k_proj" not in n}
    torch.testing.assert_close(
        compiled(IDS).logits, rounded(model, "int8", names)(IDS).logits, rtol=1e-4, atol=1e-5
    )
    assert {s.place.module for s in packed_sites(model)} == names
    said = {(e.asked, e.got, e.reason) for e in sessions_of(model)[0].record.effective}
    assert ("weights: lm_head", "as they are (1 layers)", "the head decides") in said


@torch.no_grad()
def test_a_match_for_nothing_names_the_nearest():
    error = raised(packing(Mlp(), [{"match": "gats", "scheme": "int8"}]), torch.ones(2, 16))
    assert isinstance(error, SpecError) and "`gats` selects no module" in str(error)
    assert "gate" in str(error)
    error = raised(
        packing(Mlp(), [{"match": "**", "scheme": "fp8", "group": 64}]), torch.ones(2, 16)
    )
    assert "fp8 has no groups of its own" in str(error)


def changes():
    def version(model):
        model.gate.weight.mul_(2)

    def data(model):
        model.gate.weight.data.mul_(2)

    def replaced(model):
        model.gate.weight = nn.Parameter(model.gate.weight * 2)

    def loaded(model):
        model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})

    return [version, data, replaced, loaded]


@pytest.mark.parametrize("lowering", ["eager", "auto"])
@pytest.mark.parametrize("change", changes(), ids=lambda f: f.__name__)
@torch.no_grad()
def test_changed_weights_are_packed_again(change, lowering):
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(3, 16)
    compiled = packing(model, [{"match": "**", "scheme": "int8"}], lowering=lowering)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), rounded(model, "int8")(x), rtol=1e-4, atol=1e-5)
        before = compiled(x)
        change(model)
    assert not torch.equal(compiled(x), before)


@torch.no_grad()
def test_a_parameter_of_several_modules():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(0)
    model, x = Shared(), torch.randn(3, 16)
    compiled = packing(model, [{"match": "b", "scheme": "int8"}])
    want = copy.deepcopy(model)
    want.b.weight = nn.Parameter(nearest(model.b.weight, "int8", 0, False, ""))
    torch.testing.assert_close(compiled(x), want(x), rtol=1e-5, atol=1e-6)
    assert [s.place.module for s in packed_sites(model)] == ["b"]


@torch.no_grad()
def test_transposed_weights_and_activations():
    """GPT-2 keeps its weights transposed; an activation that a rule took in with a linear comes out again."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, activation_function="gelu_pytorch_tanh")).eval()
    compiled = packing(model, [{"match": "**", "scheme": "int8"}])
    want = rounded(model, "int8")(IDS).logits
    torch.testing.assert_close(compiled(IDS).logits, want, rtol=1e-4, atol=1e-5)
    assert len(packed_sites(model)) == 9


@torch.no_grad()
def test_activations_become_integers_too():
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(3, 16)
    compiled = packing(model, [{"match": "**", "scheme": "int8", "activations": "int8"}])
    want, layout = rounded(model, "int8"), Layout("int8")
    weights_alone = want(x)
    for module in want.modules():
        if is_linear(module):
            module.register_forward_pre_hook(lambda _, args: (round_inputs(args[0], layout),))
    torch.testing.assert_close(compiled(x), want(x), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(want(x), weights_alone, rtol=1e-5, atol=1e-6)


def test_gradients_leave_weights_alone():
    model, x = Mlp(), torch.randn(3, 16)
    compiled = packing(model, [{"match": "**", "scheme": "int8"}])
    assert torch.equal(compiled(x), model(x)) and not packed_sites(model)
    said = [e for e in report(model).record.effective if e.asked.startswith("weights")]
    assert said and "gradients" in said[0].reason


@torch.no_grad()
def test_what_is_no_linear_or_no_module_says_so():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.direct = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.used(x) * self.direct.weight.sum()

    model, x = Twice(), torch.randn(2, 16)
    packing(model, [{"match": "used", "scheme": "int8"}])(x)
    assert len(packed_sites(model)) == 1

    def function(x):
        return x * 2

    packing(function, [{"match": "**", "scheme": "int8"}])(x)
    said = [e.reason for e in sessions_of(function)[0].record.effective]
    assert "what is compiled is no module: its weights have no names" in said


@torch.no_grad()
def test_a_layer_that_no_rule_takes_says_why():
    model = Mlp().double()
    packing(model, [{"match": "**", "scheme": "int8"}], explain=True)(torch.randn(2, 16).double())
    assert not packed_sites(model)
    said = {e.asked: e.reason for e in sessions_of(model)[0].record.effective}
    assert "T in {f32, bf16, f16}" in said["weights: gate"]
