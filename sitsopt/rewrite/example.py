"""An example of a rule as a graph and real inputs: what `verify` executes and what fuzzing is seeded with."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)  # fmt: skip

from ..graph import ops as _reference_ops  # noqa: F401  registers the sits:: ops
from ..graph.build import Builder
from ..graph.facts import DTYPES
from ..spec.rule import Example, Input, Rule
from .edit import run
from .values import plain
from .view import GraphView


@dataclass
class Case:
    """A graph built from a program, the real inputs it runs on, and its indexed view."""

    gm: GraphModule
    inputs: list[Any]
    view: GraphView


def build(rule: Rule, spelling: int, example: Example) -> Case:
    """The graph of an example: its `given` program, else the spelling's own.

    Raises whatever the ops raise when the example's shapes do not fit the program.
    """
    env: dict[str, Any] = {k: plain(v) for k, v in rule.spellings[spelling].fixed.items()}
    env.update(_bindings(rule, example))
    dynamic = set(example.symbolic)
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    graph, inputs = Graph(), []
    params, states = [], []
    torch.manual_seed(zlib.crc32(rule.id.encode()))
    for spec in rule.inputs.values():
        if spec.kind == "const":
            env.setdefault(spec.name, plain(spec.default))
            continue
        if spec.name in example.absent:
            env[spec.name] = None
            continue
        real = make_input(spec, env, example)
        node = graph.placeholder(spec.name)
        node.meta["val"] = _fake(mode, real, spec, dynamic)
        inputs.append(real)
        env[spec.name] = node
        if spec.kind == "param":
            params.append(node)
        if spec.kind == "state":
            states.append(node)
    program = example.given or rule.spellings[spelling].program
    outputs = run(program, env, Builder(graph, mode))
    graph.output(tuple(outputs))
    for name, path in example.modules.items():
        for reader in env[name].users:
            reader.meta["nn_module_stack"] = {"given": (path, "")}
    _drop_unused(graph, inputs)
    gm = GraphModule({}, graph)
    return Case(gm, inputs, GraphView(gm, params, states))


def _bindings(rule: Rule, example: Example) -> dict[str, Any]:
    variables = set(rule.dtypes)
    return {k: DTYPES[v] if k in variables else plain(v) for k, v in example.binding.items()}


def _drop_unused(graph: Graph, inputs: list[Any]) -> None:
    for i, node in reversed(list(enumerate(n for n in graph.nodes if n.op == "placeholder"))):
        if not node.users:
            graph.erase_node(node)
            del inputs[i]


def _shape(spec: Input, env: dict[str, Any], example: Example) -> list[int]:
    shape: list[int] = []
    if spec.name in example.shapes:
        return list(example.shapes[spec.name])
    for dim in spec.dims or ():
        size = dim.size if dim.size is not None else env[dim.name]
        shape.extend(size if isinstance(size, (tuple, list)) else [size])
    return shape


def make_input(spec: Input, env: dict[str, Any], example: Example) -> torch.Tensor:
    """A seeded random tensor of an input's shape and dtype; `values` and `layout` of the example change it."""
    shape = _shape(spec, env, example)
    name = example.dtypes.get(spec.name, spec.dtype or "f32")
    dtype = DTYPES.get(name) or env[name]
    kind = example.values.get(spec.name, "randn")
    if dtype == torch.bool:
        base = torch.rand(shape) > 0.3
    elif not dtype.is_floating_point:
        base = (torch.randint(0, 7, shape) * (kind != "zeros")).to(dtype)
    elif kind == "randn":
        base = torch.randn(shape).to(dtype)
    else:
        fill = {
            "zeros": 0.0,
            "ones": 1.0,
            "large": 1e4,
            "small": 1e-30,
            "nan": float("nan"),
            "inf": float("inf"),
        }
        base = torch.full(shape, fill[kind]).to(dtype)
    return _laid_out(base, example.layout.get(spec.name, "contiguous"))


def _laid_out(base: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed" and base.dim() >= 2:
        return base.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided" and base.dim() >= 1:
        wide = torch.zeros(*base.shape[:-1], base.shape[-1] * 2, dtype=base.dtype)
        wide[..., ::2] = base
        return wide[..., ::2]
    return base


def _fake(mode: FakeTensorMode, real: torch.Tensor, spec: Input, dynamic: set[str]) -> torch.Tensor:
    names: list[str | None] = []
    for dim in spec.dims or ():
        names.extend([dim.name] * (1 if not dim.pack else real.dim() - len(spec.dims or ()) + 1))
    if not dynamic.intersection(n for n in names if n):
        return mode.from_tensor(real)
    sizes = [DimDynamic.DYNAMIC if n in dynamic else DimDynamic.STATIC for n in names]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    from torch._dynamo.source import ConstantSource

    return mode.from_tensor(real, symbolic_context=context, source=ConstantSource(spec.name))


def placeholders(gm: GraphModule) -> list[Node]:
    """The inputs of a graph, in order."""
    return [n for n in gm.graph.nodes if n.op == "placeholder"]
