"""From a finished decode graph to the text of a region, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...emit.cpp.region import Function, Value, contiguous
from ...emit.cpp.region_calls import Unit, call
from ...emit.cpp.region_unit import region_text
from ...emit.kernel import Kernel, KvAttention
from ...graph.facts import DTYPE_NAMES, tensor
from .scope import LARGEST_COPY, Scope, Sym, Unsupported, writes_cache
from .steps import step

SYMBOL = "sits_region"
LAYER = torch.ops.higher_order.invoke_subgraph
Facts = tuple[str, tuple[int, ...], tuple[int, ...], bool]  # dtype, sizes, strides, written


@dataclass
class Planned:
    """A region as data. pointers: kernel functions in the order the text numbers them; inputs: kernels whose linears
    take rows of k; places: which arguments are tensors, before `numbers`, sizes that its values hang on, and `constants`; outputs: what the graph gives: ("result",
    number), ("argument", number), ("size", tree) or ("const", value); caches: kernels of packed caches, which arguments
    are state and length, and how many tokens a step brings."""

    text: str
    pointers: list[tuple[Kernel, str]]
    inputs: list[tuple[Kernel, int, int]]
    places: list[int]
    numbers: list[int]
    arguments: list[Facts]
    results: list[Facts]
    outputs: list[tuple[str, Any]]
    ops: int = 0
    floats: int = 0  # that a member needs for products by columns
    constants: list[torch.Tensor] = field(default_factory=list)
    caches: list[tuple[KvAttention, int, int, int]] = field(default_factory=list)


def plan(gm: GraphModule) -> Planned:
    """The region of a whole graph. Raises Unsupported."""
    return _Planner(gm).planned()


class _Planner:
    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.unit = gm, Unit()
        self.inlined: dict[Any, GraphModule] = {}
        self.layers: dict[str, tuple[Function, set[int], list[Any]]] = {}
        self.main = Function("region_main")
        self.scope = Scope(self.main, self.unit, self.inlined)
        self.places: list[int] = []
        self.numbers: list[int] = []
        self.arguments: list[Facts] = []
        self.constants: list[torch.Tensor] = []
        self.results: list[Facts] = []
        self.ops = 0

    def planned(self) -> Planned:
        graph = self.gm.graph
        self._take_arguments(graph)
        out = graph.output_node().args[0]
        wanted = list(out) if isinstance(out, (list, tuple)) else [out]
        self._place_results(wanted, graph)
        nodes = self.scope.run(graph, self._step)
        outputs = [self._output(n) for n in nodes]
        if not self.unit.pointers and not self.unit.floats:
            raise Unsupported("nothing in it reads weights or a cache")
        return Planned(
            region_text(SYMBOL, self.unit, self.main), list(self.unit.pointers), sorted(self.unit.inputs, key=repr),
            self.places, self.numbers, self.arguments, self.results, outputs, self.ops, self.unit.floats, self.constants,
            self._caches(),
        )  # fmt: skip

    def _caches(self) -> list[tuple[KvAttention, int, int, int]]:
        """Of every layer, in the order of the graph."""
        found = []
        order = {id(self.scope.env[n]): self.places.index(i) for i, n in self._tensors()}
        for kernel, state, length, tokens in self.scope.caches:
            found.append((kernel, order[id(state)], order[id(length)], tokens))
        return found

    def _tensors(self) -> list[tuple[int, Node]]:
        inputs = list(self.gm.graph.find_nodes(op="placeholder"))
        return [(i, n) for i, n in enumerate(inputs) if i in self.places]

    def _take_arguments(self, graph: Graph) -> None:
        written = _written(graph)
        inputs = list(graph.find_nodes(op="placeholder"))
        for number, node in enumerate(inputs):
            if isinstance(node.meta.get("val"), (int, torch.SymInt)):
                self.scope.env[node] = Sym(("arg", number))
                continue
            self.places.append(number)
            self.scope.env[node] = self._argument(node, _facts(node, node in written))
        for number, node in enumerate(inputs):
            if isinstance(self.scope.env[node], Sym) and _counts(node):
                self.numbers.append(number)
                self.scope.numbers[number] = self._argument(node, ("i64", (), (), False))
        for node in graph.find_nodes(op="get_attr"):
            held = _attribute(self.gm, str(node.target))
            if isinstance(held, torch.Tensor):
                self.constants.append(held.detach())
                facts = (DTYPE_NAMES[held.dtype], tuple(held.shape), tuple(held.stride()), False)
                self.scope.env[node] = self._argument(node, facts)

    def _argument(self, node: Node, facts: Facts) -> Value:
        self.arguments.append(facts)
        dtype, sizes, strides, _ = facts
        return self.main.argument(len(self.arguments) - 1, dtype, sizes, strides)

    def _place_results(self, wanted: Sequence[Any], graph: Graph) -> None:
        """Tensors of the region's own that it gives: behind the arguments."""
        for node in dict.fromkeys(w for w in wanted if isinstance(w, Node)):
            if node.op == "placeholder" or tensor(node) is None:
                continue
            facts = _facts(node, True)
            number = len(self.arguments) + len(self.results)
            self.scope.results[node] = self.main.argument(number, *facts[:3])
            self.results.append(facts)

    def _output(self, node: Any) -> tuple[str, Any]:
        if not isinstance(node, Node):
            return "const", node
        found = self.scope.env[node]
        if isinstance(found, Sym):
            return "size", found.tree
        if node.op == "placeholder":
            return "argument", list(self.gm.graph.find_nodes(op="placeholder")).index(node)
        _store(self.scope, node)
        return "result", list(self.scope.results).index(node)

    def _step(self, scope: Scope, node: Node) -> Any:
        self.ops += 1
        return self._call(scope, node) if node.target is LAYER else step(scope, node)

    def _call(self, scope: Scope, node: Node) -> list[Value]:
        _, name, *given = node.args
        body = _attribute(self.gm, str(node.args[0].target)).graph  # type: ignore[union-attr]
        if name not in self.layers:
            self.layers[str(name)] = self._layer(str(name), body)
        callee, written, caches = self.layers[str(name)]
        places = list(body.find_nodes(op="placeholder"))
        operands = [
            self._conform(scope, g, _facts(p, False)) for g, p in zip(given, places, strict=True)
        ]
        for number in sorted(written):
            home = operands[number].home
            if given[number].op != "placeholder" or [o.home for o in operands].count(home) != 1:  # type: ignore[union-attr]
                raise Unsupported(f"{given[number]} is written and read under two names")
            scope.before_write(home, node)
        for kernel, state, length, tokens in caches:
            scope.caches.append((kernel, operands[state], operands[length], tokens))
        made = [scope.f.common(*facts[:2]) for facts in self._facts_of(body)]
        call(scope.f, callee, operands, made)
        return made

    def _facts_of(self, body: Graph) -> list[Facts]:
        given: Any = body.output_node().args[0]
        found = [_facts(n, True) for n in given]
        if any(f[2] != contiguous(f[1]) for f in found):
            raise Unsupported("a layer gives a tensor that is not dense")
        return found

    def _layer(self, name: str, body: Graph) -> tuple[Function, set[int], list[Any]]:
        f = Function(f"layer_{name}")
        scope = Scope(f, self.unit, self.inlined)
        places, written = list(body.find_nodes(op="placeholder")), _written(body)
        for number, node in enumerate(places):
            scope.env[node] = f.argument(number, *_facts(node, False)[:3])
        outs = list(body.output_node().args[0])  # type: ignore[arg-type]
        for number, (node, facts) in enumerate(zip(outs, self._facts_of(body), strict=True)):
            if node in scope.results:
                raise Unsupported("a layer gives a tensor twice")
            scope.results[node] = f.argument(len(places) + number, *facts[:3])  # type: ignore[index]
        for node in scope.run(body, self._step):
            _store(scope, node)
        f.barrier()
        self.unit.functions.append(f)
        at = {id(scope.env[p]): i for i, p in enumerate(places)}
        caches = [(kernel, at[id(s)], at[id(n)], t) for kernel, s, n, t in scope.caches]
        return f, {places.index(w) for w in written}, caches

    def _conform(self, scope: Scope, arg: Any, facts: Facts) -> Value:
        """An operand, laid out as the layer expects it."""
        value = scope.value(arg)
        dtype, sizes, strides, _ = facts
        if value.dtype != dtype or value.sizes != sizes:
            raise Unsupported(f"{arg} is not what the layer takes")
        if all(n == 1 or a == b for n, a, b in zip(sizes, value.strides, strides, strict=True)):
            return value
        if value.count > LARGEST_COPY or strides != contiguous(sizes):
            raise Unsupported(f"{arg} does not lie as the layer takes it")
        dense = scope.f.own(dtype, sizes)
        scope.f.store(value, dense)
        return dense


def _store(scope: Scope, node: Node) -> None:
    """Bring a result to where it has to lie, unless it was made there."""
    found, wanted = scope.env[node], scope.results[node]
    if not isinstance(found, Value) or found.home != wanted.home:
        scope.f.store(scope.get(node), wanted)


def _counts(node: Node) -> bool:
    """Whether a size becomes a tensor's value."""
    return any(tensor(u) is not None or _counts(u) for u in node.users)


def _written(graph: Graph) -> set[Node]:
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    found = {n.args[0] for n in copies}
    for node in graph.nodes:
        if writes_cache(node):
            found |= {node.args[3], node.args[4]}
    for node in graph.find_nodes(op="call_function", target=LAYER):
        body = _attribute(graph.owning_module, str(node.args[0].target)).graph
        places = list(body.find_nodes(op="placeholder"))
        found |= {node.args[2 + places.index(w)] for w in _written(body)}
    return found


def _facts(node: Node, written: bool) -> Facts:
    fake = tensor(node)
    if fake is None or fake.dtype not in DTYPE_NAMES:
        raise Unsupported(f"{node} is no tensor that regions know")
    if any(type(n) is not int for n in (*fake.shape, *fake.stride())):
        raise Unsupported("a size varies")
    if fake.device.type != "cpu":
        raise Unsupported(f"a tensor on {fake.device.type}")
    return DTYPE_NAMES[fake.dtype], tuple(fake.shape), tuple(fake.stride()), written


def _attribute(gm: Any, name: str) -> Any:
    for part in name.split("."):
        gm = getattr(gm, part)
    return gm
