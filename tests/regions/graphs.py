"""Graphs made by hand and at random, and rules and costs to plan them with. Values are tensors of the meta device."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from sitsopt.graph.regions.forks import Costs
from sitsopt.spec.region import RegionFile, load_region

aten = torch.ops.aten
SIZE = 16
RULE = """
summary: Anything.
capture: [aten.*]
split: {aten.nonzero: the size depends on values, aten.item: the host waits}
min_kernels: 1
streams: {side: 2, gain_us: 0.5}
"""


def rule(text: str = RULE, **more: Any) -> RegionFile:
    made = load_region("decode.yaml", "decode", text)
    return made.model_copy(update=more) if more else made


def costs(us: float = 5.0, gap: float | None = 0.5, **more: Any) -> Costs:
    unified = more.pop("unified", (True, "one device"))
    return Costs(lambda node: us, gap, 3.0, unified, more.pop("limit", None))


class Made:
    """A graph under construction."""

    def __init__(self) -> None:
        self.graph = Graph()

    def input(self, name: str, *shape: int) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape or (SIZE, SIZE), device="meta")
        return node

    def call(self, op: Any, *args: Any, val: Any = None) -> Node:
        node = self.graph.call_function(op, args)
        plain = torch.utils._pytree.tree_map(
            lambda a: a.meta["val"] if isinstance(a, Node) else a, args
        )
        node.meta["val"] = op(*plain) if val is None else val
        return node

    def done(self, *results: Node) -> Graph:
        self.graph.output(results)
        self.graph.lint()
        return self.graph


def experts(count: int = 3, length: int = 3) -> Graph:
    """One input, `count` chains of matrix products that do not need each other, their sum."""
    made = Made()
    x, w = made.input("x"), made.input("w")
    start = made.call(aten.relu.default, x)
    ends = []
    for _ in range(count):
        one = start
        for _ in range(length):
            one = made.call(aten.mm.default, one, w)
        ends.append(one)
    total = ends[0]
    for one in ends[1:]:
        total = made.call(aten.add.Tensor, total, one)
    return made.done(made.call(aten.relu.default, total))


def at_random(seed: int, count: int = 30, splits: float = 0.1) -> Graph:
    """A graph of `count` calls: products, sums, views, lists taken apart, and calls that no region may hold."""
    rng = random.Random(seed)
    made = Made()
    values = [made.input("x"), made.input("w")]
    kinds: list[Callable[[], Node]] = [
        lambda: made.call(aten.mm.default, rng.choice(values), rng.choice(values)),
        lambda: made.call(aten.add.Tensor, rng.choice(values[-6:]), rng.choice(values)),
        lambda: made.call(aten.relu.default, rng.choice(values[-4:])),
        lambda: made.call(aten.t.default, rng.choice(values[-4:])),
        lambda: halves(made, rng.choice(values[-4:])),
    ]
    while len(made.graph.nodes) < count:
        if rng.random() < splits:
            base = rng.choice(values[-4:])
            values.append(made.call(aten.nonzero.default, base, val=torch.empty(SIZE, SIZE, device="meta")))  # fmt: skip
        else:
            values.append(rng.choice(kinds)())
    return made.done(*values[-2:])


def halves(made: Made, x: Node) -> Node:
    pair = made.call(aten.var_mean.correction, x, [0])
    return made.call(aten.add.Tensor, x, made.call(operator.getitem, pair, 1))
