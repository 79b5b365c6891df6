"""Tracing each distinct call once gives the graph that tracing every call gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from sitsopt.graph import capture as capturing
from sitsopt.graph import layouts, samples
from sitsopt.graph.capture import Captured, capture
from sitsopt.graph.facts import module_path


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.RMSNorm(width),
            nn.Linear(width, 16),
            nn.Linear(16, width),
        )

    def forward(self, x, cache, at):
        y = self.norm(x)
        cache.index_copy_(1, at, y)
        heads = (cache * 2).transpose(0, 1)[..., ::2].chunk(2, -1)
        y = self.down(F.silu(self.up(y))) + heads[1].float().sum((0, -1), keepdim=True)
        return x + y.to(x.dtype)


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x, caches, at):
        self.steps.add_(1)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, at)
        return x, caches[0]


def stack(layers: int) -> tuple[nn.Module, list[Any]]:
    caches = [torch.zeros(1, 5, 8) for _ in range(layers)]
    return Stack(layers).eval(), [torch.randn(1, 1, 8), caches, torch.tensor([2])]


def graphs(fn: Any, *args: Any) -> list[tuple[Captured, Captured]]:
    """Each graph as it is captured, and as it is when it is traced node by node."""
    found: list[tuple[Captured, Captured]] = []

    def backend(gm, inputs):
        graph, written = capturing._whole(gm, inputs)
        found.append((capture(gm, inputs), capturing._captured(gm, inputs, graph, written)))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend)(*args)
    return found


def lines(captured: Captured) -> list[str]:
    """A graph as text: ops, arguments, layouts, and where in the model each comes from."""
    number: dict[Node, int] = {}

    def show(args: Any) -> str:
        return repr(map_arg(args, lambda n: f"%{number[n]}"))

    text = []
    for node in captured.gm.graph.nodes:
        number[node] = len(number)
        tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
        values = [(t.shape, t.stride(), t.dtype) for t in tensors]
        place = (node.meta.get("stack_trace"), module_path(node))
        what = number[node] if node.op == "placeholder" else node.target
        text.append(f"{what} {show(node.args)} {show(node.kwargs)} {values} {place * bool(values)}")
    return text


def test_a_model_of_equal_layers_is_the_same_graph_either_way() -> None:
    model, args = stack(3)
    ((fast, slow),) = graphs(model, *args)
    assert not fast.whole
    skip = len(fast.placeholders)
    assert lines(fast)[skip:] == lines(slow)[skip:]
    number = {p: i for i, p in enumerate(fast.placeholders)}
    other = {p: i for i, p in enumerate(slow.placeholders)}
    assert [number[p] for p in fast.written] == [other[p] for p in slow.written]
    assert {number[p] for p in fast.params} == {other[p] for p in slow.params}
    assert len(fast.written) == 4 and len(fast.params) == 15


def test_a_call_is_traced_once_however_many_layers_there_are(monkeypatch) -> None:
    counts = []
    fragments = samples._fragments

    def counted(found, marks):
        counts.append((len(found), len(marks.calls)))
        return fragments(found, marks)

    monkeypatch.setattr(samples, "_fragments", counted)
    for layers in (2, 6):
        model, args = stack(layers)
        graphs(model, *args)
    (few, small), (many, large) = counts
    assert few == many and large > 2.5 * small


def inputs_at_two_scales(x, y):
    return (x * 2.0) + (y * 2), x * -0.0, x * 0.0


def two_dtypes(x, y):
    return x.to(torch.float64) + 1, y.to(torch.bfloat16) + 1


def two_layouts(x, y):
    return x.reshape(-1), x.t().reshape(-1), y[1:].contiguous(), y.t().contiguous()


def read_before_and_after(x, y):
    before = x * 2
    x.add_(y)
    return before, x * 2, x


def intermediate_written(x, y):
    z = x + y
    z.mul_(2).add_(1)
    return z, z.sum()


def many_results(x, y):
    values, places = x.topk(2)
    a, b = y.split(2)
    return torch.cat([a, b]), values, places, torch.cat([b, a])


def without_inputs(x, y):
    return x + torch.arange(4), y + torch.arange(4), torch.ones(3)


def same_value_twice(x, y):
    return x + x, x + y, torch.cat([x, x]), torch.cat([x, y])


@pytest.mark.parametrize("fn", [inputs_at_two_scales, two_dtypes, two_layouts, read_before_and_after,
                                intermediate_written, many_results, without_inputs, same_value_twice])  # fmt: skip
def test_calls_that_differ_in_anything_are_traced_apart(fn) -> None:
    ((fast, slow),) = graphs(fn, torch.randn(4, 4), torch.randn(4, 4))
    assert not fast.whole
    skip = len(fast.placeholders)
    assert lines(fast)[skip:] == lines(slow)[skip:]


def view_of_the_written(x, y):
    row = x[0]
    x.add_(y)
    return row * 2


def written_through_a_view(x, y):
    x[0].add_(1)
    return x * y


def data_dependent(x, y):
    return x.nonzero(), y


def constant(x, y):
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0]), y


@pytest.mark.parametrize(
    "fn", [view_of_the_written, written_through_a_view, data_dependent, constant]
)
def test_what_samples_cannot_tell_is_traced_whole(fn) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ((fast, slow),) = graphs(fn, torch.randn(4, 4), torch.randn(4, 4))
    assert fast.whole
    assert [str(n.target) for n in fast.gm.graph.nodes] == [
        str(n.target) for n in slow.gm.graph.nodes
    ]


def test_gradients_and_symbolic_sizes_are_traced_whole() -> None:
    found: list[Captured] = []

    def backend(gm, inputs):
        found.append(capture(gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    fn = torch.compile(lambda x: x * 2, backend=backend)
    fn(torch.randn(3, requires_grad=True))
    assert found[-1].whole == "gradients are recorded"
    torch._dynamo.reset()
    torch.compile(lambda x: x * 2, backend=backend, dynamic=True)(torch.randn(5, 3))
    assert found[-1].whole


def test_written_inputs_that_share_memory_are_left_to_eager() -> None:
    def backend(gm, inputs):
        with pytest.raises(capturing.OnlyEager):
            capture(gm, inputs)
        return gm.forward

    def both(a, b):
        a.add_(1)
        return b * 2

    torch._dynamo.reset()
    x = torch.zeros(6)
    got = torch.compile(both, backend=backend)(x[:4], x[2:])
    assert torch.equal(got, torch.tensor([2.0, 2.0, 0.0, 0.0]))


def test_only_dense_tensors_have_a_layout() -> None:
    assert layouts.mark(torch.ones(2, 3).t())[:2] == ((3, 2), (1, 3))
    with pytest.raises(layouts.Unsuited):
        layouts.mark(torch.ones(2).to_sparse())
