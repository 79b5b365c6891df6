"""Which inputs of a captured graph are constants of the model, and which values share storage."""

from __future__ import annotations

import torch
from torch import nn

from sitsopt.graph.capture import Captured, capture
from sitsopt.graph.facts import storage_root


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("own", torch.ones(4, 1, 1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, scale):
        self.count.add_(1)
        return self.norm(self.conv(x)) * self.own * scale


def captured(model, *args: torch.Tensor) -> Captured:
    found: list[Captured] = []

    def backend(gm, inputs):
        found.append(capture(gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(*args)
    return found[0]


def test_buffers_count_as_parameters_arguments_and_written_buffers_do_not():
    model = Model().eval()
    x, scale = torch.randn(1, 3, 5, 5), torch.ones(4, 1, 1)
    graph = captured(model, x, scale)
    of = {id(v): p in graph.params for p, v in zip(graph.placeholders, graph.inputs, strict=True)}
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert not of[id(mine.pop("count"))] and not of[id(x)] and not of[id(scale)]
    mine.pop("norm.num_batches_tracked")
    assert all(of[id(value)] for value in mine.values())


def test_results_of_one_op_own_their_storage_and_pieces_of_a_split_share_it():
    def fn(x, mean, var):
        y = torch.nn.functional.batch_norm(x, mean, var, training=True)
        a, b = torch.split(x, 2, 1)
        return y, a.neg(), b.neg()

    graph = captured(fn, torch.randn(3, 4), torch.zeros(4), torch.ones(4))
    (x, *_) = graph.placeholders
    roots = {n.name: storage_root(n) for n in graph.gm.graph.nodes if "getitem" in n.name}
    pieces = [name for name, root in roots.items() if root is x]
    assert len(pieces) == 2 and all(roots[n].name == n for n in roots if n not in pieces)


def test_dropout_that_drops_nothing_is_its_input_where_something_is_written():
    """Eager gives back the input itself, so a write to either is seen through both."""

    def own(x):
        y = nn.functional.dropout(x, 0.5, False)
        x.add_(1)
        return torch.cos(y)

    def other(x):
        y = nn.functional.dropout(torch.sin(x), 0.5, training=False)
        y *= 2
        return torch.cos(y)

    def none(x):
        return torch.cos(nn.functional.dropout(x, 0.5, False))

    for fn, dropouts in ((own, 0), (other, 0), (none, 1)):
        graph = captured(fn, torch.randn(3)).gm.graph
        found = [n for n in graph.nodes if n.target is torch.ops.aten.dropout.default]
        assert len(found) == dropouts
