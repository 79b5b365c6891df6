"""What is stamped into equal layers is what each of them would have got: node by node and record by record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.fx import GraphModule

from sitsopt.graph.capture import capture
from sitsopt.planning import facts_of
from sitsopt.rewrite.engine import Applied, Settings, rewrite
from sitsopt.rewrite.order import ordered
from sitsopt.rewrite.record import GraphRecord
from sitsopt.rewrite.stamp import Stamp
from sitsopt.rewrite.view import GraphView
from sitsopt.runtime.machine import detect_target
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.rule import Rule, load_rules
from sitsopt.spec.target import Target

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def _llama(layers: int = 7) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=layers, **SMALL)
    )


def _qwen() -> nn.Module:
    config = transformers.Qwen3Config(num_hidden_layers=6, head_dim=8, **SMALL)
    return transformers.Qwen3ForCausalLM(config)


def _gemma() -> nn.Module:
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 4
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=12, head_dim=8, sliding_window=4, layer_types=kinds, **SMALL
    )
    return transformers.Gemma3ForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=6, n_head=4, vocab_size=64, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=6, num_heads=4, vocab_size=64
    )
    return transformers.T5ForConditionalGeneration(config)


def _one_differs() -> nn.Module:
    """Layer 4 has a wider MLP, layer 8 another epsilon, and layer 10 shares a weight with layer 11."""
    model: Any = _llama(13)
    wide = transformers.LlamaConfig(num_hidden_layers=1, **SMALL | {"intermediate_size": 96})
    layers = model.model.layers
    layers[4].mlp = transformers.LlamaForCausalLM(wide).model.layers[0].mlp
    layers[8].input_layernorm.variance_epsilon = 1e-3
    layers[11].mlp.up_proj.weight = layers[10].mlp.up_proj.weight
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and edits that must be stamped
    "llama": (_llama, 20), "qwen": (_qwen, 8), "gemma": (_gemma, 30), "gpt2": (_gpt2, 6),
    "t5": (_t5, 0),  # its layers read a bias of the first, two and more layers back
    "one differs": (_one_differs, 6),
}  # fmt: skip


@pytest.fixture(scope="module")
def rules() -> list[Rule]:
    return [r for r in ordered(load_rules(rule_dirs(()))) if r.stage != "weights"]


@pytest.fixture(scope="module")
def cpu() -> Target:
    return detect_target()


def _graph(model: nn.Module) -> tuple[GraphModule, Sequence[Any]]:
    found: list[tuple[GraphModule, Sequence[Any]]] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        found.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    model = model.eval().to(torch.bfloat16)
    given: dict[str, Any] = {"input_ids": torch.arange(8)[None], "use_cache": False}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.arange(5)[None]
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(**given)
    torch._dynamo.reset()
    return max(found, key=lambda g: len(g[0].graph.nodes))


def _run(
    graph: tuple[GraphModule, Sequence[Any]], rules: list[Rule], target: Target, **how: Any
) -> tuple[GraphView, GraphRecord, list[Applied], list[str]]:
    record = GraphRecord("graph")
    with torch.no_grad():
        captured = capture(*graph)
        view = GraphView(captured.gm, captured.params, captured.written)
        before = _lines(view)
        settings = Settings(facts=facts_of(target), target=target, **how)
        applied = rewrite(view, rules, settings, record)
    return view, record, applied, before


def _lines(view: GraphView) -> list[str]:
    return [
        f"{n.name} = {n.target} {n.args} {n.kwargs} -> {n.meta.get('val')} read by {sorted(n.users)}"
        f" of {n.meta.get('nn_module_stack')} at {n.meta.get('stack_trace')} {n.meta.get('sits_fold')}"
        for n in view.graph.nodes
    ]


def _told(record: GraphRecord) -> dict[str, Any]:
    """A record without what a clock says."""
    told = asdict(record)
    told["stages"] = [(stage, count) for stage, count, _ in record.stages]
    return told


def _matched(applied: list[Applied]) -> list[str]:
    return [
        f"{a.key} {a.match.anchor} {a.match.bound} {a.match.nodes} {a.match.returns} {a.match.inputs} {a.claimed}"
        f" {a.edit and (a.edit.made, a.edit.died, a.edit.pairs, a.edit.moved)}"
        for a in applied
    ]


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    stamped = [0]
    original = Stamp.apply

    def counting(self: Stamp, *args: Any) -> Any:
        stamped[0] += 1
        return original(self, *args)

    monkeypatch.setattr(Stamp, "apply", counting)
    return stamped


@pytest.mark.parametrize("name", MODELS)
def test_same_graph_same_record(
    name: str, rules: list[Rule], cpu: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, least = MODELS[name]
    graph = _graph(make())
    one, told, applied, _ = _run(graph, rules, cpu, stamp=False)
    stamped = _counted(monkeypatch)
    two, told_two, applied_two, before = _run(graph, rules, cpu)
    assert stamped[0] >= least
    assert _told(told) == _told(told_two)
    assert _matched(applied) == _matched(applied_two)
    assert _lines(one) == _lines(two)
    for edit in reversed([a.edit for a in applied_two if a.edit]):
        edit.undo(two)
    assert _lines(two) == before


def test_a_site_that_is_switched_off_stays_so(
    rules: list[Rule], cpu: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = _graph(_llama())
    off = "fuse/swiglu@model.layers.4.mlp#0"
    stamped = _counted(monkeypatch)
    one = _run(graph, rules, cpu, stamp=False, allow=lambda key: key != off)
    two = _run(graph, rules, cpu, allow=lambda key: key != off)
    assert stamped[0]
    assert _told(one[1]) == _told(two[1]) and _lines(one[0]) == _lines(two[0])
    sites = [s.place.module for s in two[1].sites if s.rule == "fuse/swiglu"]
    assert "model.layers.3.mlp" in sites and "model.layers.4.mlp" not in sites


class _Zeros(nn.Module):
    """Layers that add -0.0, but for one that adds 0.0: only that changes a value."""

    def __init__(self, zeros: Sequence[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Zero(zero) for zero in zeros)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Zero(nn.Module):
    def __init__(self, zero: float) -> None:
        super().__init__()
        self.zero = zero

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + self.zero


def test_zeros_of_two_signs_are_no_equal_layers() -> None:
    zeros = [-0.0] * 4 + [0.0] + [-0.0] * 4
    found: list[tuple[GraphModule, Sequence[Any]]] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        found.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(_Zeros(zeros), backend=backend)(torch.ones(3))
    torch._dynamo.reset()
    with torch.no_grad():
        captured = capture(*found[0])
        lanes = GraphView(captured.gm, captured.params, captured.written).lanes
    assert lanes is not None
    kinds = {lane.path: kind for lane, kind in zip(lanes.lanes, lanes.kinds, strict=True)}
    names = [next(p for p in kinds if p.endswith(f".{i}")) for i in range(len(zeros))]
    same = [kinds[name] == kinds[names[1]] for name in names[1:]]
    assert same == [True, True, True, False, True, True, True, False]  # the last one is returned
