"""The GPU lowering, as far as a machine without a GPU can show it: fake CUDA tensors, a driver that only names its
architecture, kernels compiled for real. Nothing here is launched or timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from torch._functorch.aot_autograd import aot_export_module
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from triton.backends.compiler import GPUTarget

from sitsopt.graph.capture import Captured
from sitsopt.measure.explain import explain
from sitsopt.options import Options
from sitsopt.runtime import machine, profit
from sitsopt.runtime.lower import Lowering, choose_kernels
from sitsopt.runtime.triton import choose, device
from sitsopt.runtime.triton.compile import Facts
from sitsopt.runtime.triton.fit import Fitted
from sitsopt.spec.target import load_target
from tests.rules.models import build

BF16 = torch.bfloat16


class OnlyNames:
    """A driver of a GPU that is not there: enough for Triton to see which arguments a kernel writes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def named_driver() -> Iterator[None]:
    before = triton.runtime.driver._active
    triton.runtime.driver._active = OnlyNames()
    yield
    triton.runtime.driver._active = before


def graph_of(fake: FakeTensorMode, rows: int = 1) -> tuple[GraphModule, list[Any], dict[str, Node]]:
    """A norm, a gate, a rotation, a cached attention and a projection, as rules leave them."""
    sits = torch.ops.sits
    with fake:
        shapes = {
            "x": (1, rows, 256), "w": (256,), "q": (1, 8, rows, 64), "k": (1, 2, 4096, 64),
            "table": (1, 1, rows, 64), "proj": (512, 256),
        }  # fmt: skip
        values = {n: torch.empty(s, dtype=BF16, device="cuda") for n, s in shapes.items()}
    graph, nodes = Graph(), dict[str, Node]()
    for name, value in values.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = value
    n = nodes

    def call(name: str, op: Any, result: Any, *args: Any) -> None:
        nodes[name] = graph.call_function(op, args)
        nodes[name].meta["val"] = result

    x, q = values["x"], values["q"]
    call("norm", sits.add_rms_norm.default, (x, x), n["x"], n["x"], n["w"], 1e-5)
    call("turn", sits.rope.default, q, n["q"], n["table"], n["table"])
    call("seen", sits.attention.default, q, n["turn"], n["k"], n["k"], None, 0.125)
    call("gate", sits.swiglu.default, x, n["x"], n["x"])
    call("wide", sits.linears.default, [x], n["x"], [n["proj"]], [None])
    graph.output(tuple(nodes[name] for name in ("norm", "seen", "gate", "wide")))
    return GraphModule({}, graph), list(values.values()), nodes


def lowered(monkeypatch: pytest.MonkeyPatch, rows: int = 1) -> Any:
    """That graph after the choice of kernels on an H100, and how each node is lowered."""
    monkeypatch.setattr(machine, "detect_target", lambda device: load_target("h100"))
    fake = FakeTensorMode()
    gm, values, nodes = graph_of(fake, rows)
    places = [node for node in gm.graph.nodes if node.op == "placeholder"]
    captured = Captured(gm, places, values, set(), [])
    ops = {name: node for name, node in nodes.items() if node.op == "call_function"}
    sites = [_Applied(node) for node in ops.values()]
    choose_kernels(captured, sites, Lowering())  # type: ignore[arg-type]
    gm.recompile()
    return gm, values, fake, {n: a.site for n, a in zip(ops, sites, strict=True)}


class _Applied:
    """One rewrite that claims a node, as `choose_kernels` looks at it."""

    edit = None

    def __init__(self, node: Node) -> None:
        from sitsopt.rewrite.record import Place, Site

        self.claimed, self.site = [node], Site("rule", Place("", "", node.name))


def test_a_graph_becomes_launches(monkeypatch: pytest.MonkeyPatch, named_driver: None) -> None:
    gm, values, fake, sites = lowered(monkeypatch)
    assert {site.lowered for site in sites.values()} == {"triton"}
    with fake:
        graph, _ = aot_export_module(gm, values, trace_joint=False)
    launches = [n for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    names = [kernel_side_table.get_kernel(n.kwargs["kernel_idx"]).fn.__name__ for n in launches]
    assert names == [
        "add_rms_norm_bf16_256", "rope_half_bf16_64", "attention_decode_bf16_64_g4",
        "attention_merge_bf16_64_g4", "swiglu_bf16", "matmul_skinny_bf16_512x256",
    ]  # fmt: skip
    for launch in launches:
        written = set(launch.kwargs["tensors_to_clone"])
        assert written and not written & {"x_ptr", "w_ptr", "q_ptr", "k_ptr", "v_ptr", "cos_ptr"}
    constants = launches[2].kwargs["kwargs"]
    assert (constants["keys"], constants["ROWS"], constants["TILE"]) == (4096, 16, 64)


def test_what_is_compiled_is_named_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, _, _, sites = lowered(monkeypatch)
    assert sites["seen"].lowered_why == "attention_decode_bf16_64_g4, attention_merge_bf16_64_g4"
    texts = {n.name: n.kwargs["texts"] for n in gm.graph.nodes if "texts" in n.kwargs}
    assert len(texts) == 5 and len(set(texts.values())) == 5


def test_a_kernel_that_does_not_fit_is_inductor_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def spilling(sources: Any, target: Any) -> list[Fitted]:
        return [Fitted(s, Facts(255, 8), "8 bytes spilled" if s.family == "rope" else "") for s in sources]  # fmt: skip

    monkeypatch.setattr(choose, "fit", spilling)
    _, _, _, sites = lowered(monkeypatch)
    assert sites["turn"].lowered == "inductor"
    assert sites["turn"].lowered_why == "rope_half_bf16_64: 8 bytes spilled"
    assert sites["norm"].lowered == "triton"


def test_many_rows_stay_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fitting(sources: Any, target: Any) -> list[Fitted]:
        return [Fitted(source, Facts()) for source in sources]

    monkeypatch.setattr(choose, "fit", fitting)
    _, _, _, sites = lowered(monkeypatch, rows=17)
    assert (sites["wide"].lowered, sites["wide"].lowered_why) == ("inductor", choose.MANY_ROWS)


def test_block_sizes_that_were_settled_are_launched() -> None:
    from sitsopt.emit.rowwise import Rowwise
    from sitsopt.emit.triton import rowwise

    kernel = Rowwise("rms_norm", "bf16", 192)
    source = rowwise.source(kernel)
    device.settle(source, source.tuned({"ROWS": 2}, 8, 1))
    found = device.runner(torch.device("cuda")).source(rowwise.source, kernel)
    assert (found.constant("ROWS"), found.warps) == (2, 8)


def test_explain_names_the_kernels_of_a_target() -> None:
    options = Options.parse({"target": "h100"})
    report, _ = explain(build("llama", dtype=BF16).to("meta"), options, ["decode"])
    sites = {s.rule: s for g in report.record.graphs for s in g.sites if s.lowered == "triton"}
    assert sites["fuse/add_rms_norm"].lowered_why == "add_rms_norm_bf16_96"
    assert {"fuse/qkv", "fuse/rope", "fuse/swiglu", "attention/gqa"} <= set(sites)


@pytest.mark.slow
def test_what_a_kernel_is_measured_against_is_compiled_inside_a_compilation() -> None:
    found: list[Any] = []

    def backend(gm: GraphModule, inputs: list[torch.Tensor]) -> Any:
        fn = torch.ops.sits.swiglu
        x = torch.randn(4, 8)
        call = profit.by_inductor(fn, (x, x + 1), {})
        found.append((call(x, x + 1)[0], fn(x, x + 1)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.randn(3))
    torch.testing.assert_close(*found[0])
