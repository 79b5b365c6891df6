"""Where a graph's values are while its function is written: in memory, or to be computed where they are read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...emit.cpp.region import Function, Lazy, Operand, Value, contiguous
from ...emit.cpp.region_calls import Unit
from ...graph.facts import DTYPE_NAMES, module_path, tensor

LARGEST_COPY = 65536  # elements that are copied to keep an old value
CHEAP = 2  # ops that may be repeated for each reader
LONGEST = 24  # ops in one expression
OPERATIONS = {"add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "sym_max": "most({}, {})", "sym_min": "least({}, {})"}  # fmt: skip


class Unsupported(Exception):
    """A region cannot take the graph; the text says why."""


class Sym:
    """A size that is no constant: `tree` is ("arg", number of the placeholder), ("const", int), or
    (op, left, right)."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree


class Scope:
    """The values of one graph inside function `f`; `place`, which argument each written tensor is."""

    def __init__(self, f: Function, unit: Unit, inlined: dict[Any, GraphModule]) -> None:
        self.f, self.unit, self.inlined = f, unit, inlined
        self.env: dict[Node, Any] = {}
        self.left: dict[Node, int] = {}
        self.results: dict[Node, Value] = {}  # where a result has to lie
        self.caches: list[tuple[Any, Value, Value, int]] = []  # kernel, state, length, new tokens
        self.numbers: dict[int, Value] = {}  # sizes that are arguments, where they lie

    # values

    def get(self, arg: Any) -> Any:
        """An argument of a node as operands and plain values."""
        if isinstance(arg, Node):
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return [self.get(a) for a in arg]
        return arg

    def value(self, arg: Any) -> Value:
        """An argument as a tensor that lies somewhere. What was computed for it is kept for other readers."""
        found = self.get(arg)
        if isinstance(found, Value):
            return found
        if not isinstance(found, Lazy):
            raise Unsupported(f"{arg} is no tensor")
        settled = self.f.settled(found)
        if isinstance(arg, Node):
            self.env[arg] = settled
        return settled

    def number(self, sym: Sym) -> Lazy:
        """A size as a tensor of one integer."""
        homes: set[str] = set()

        def text(tree: Any) -> str:
            kind, *rest = tree
            if kind == "const":
                return f"{rest[0]}LL"
            if kind != "arg":
                return OPERATIONS[kind].format(*map(text, rest))
            if rest[0] not in self.numbers:
                raise Unsupported("a size varies")
            found = self.numbers[rest[0]]
            homes.update(found.reads())
            return found.read(())

        written = text(sym.tree)
        return Lazy("i64", (), lambda i: written, frozenset(homes), 0)

    def rows(self, arg: Any) -> Value:
        """A tensor as a matrix [rows, k] with dense rows."""
        value = self.value(arg)
        sizes = (value.count // value.sizes[-1], value.sizes[-1])
        flat = viewed(value, lambda t: t.view(sizes))
        if flat is None or flat.strides[1] != 1:
            dense = self.f.own(value.dtype, value.sizes)
            self.f.store(value, dense)
            flat = viewed(dense, lambda t: t.view(sizes))
        assert flat is not None
        return flat

    def inner_dense(self, arg: Any) -> Value:
        """A tensor whose last dim is dense."""
        value = self.value(arg)
        if value.strides and value.strides[-1] != 1 and value.sizes[-1] != 1:
            dense = self.f.own(value.dtype, value.sizes)
            self.f.store(value, dense)
            return dense
        return value

    def shared(self, node: Node, sizes: Sequence[int], dtype: str) -> Value:
        """Room that all members see for a result of `node`: where it has to lie in the end, if it is dense there."""
        wanted = self.results.get(node)
        if wanted is not None and wanted.strides == contiguous(wanted.sizes):
            found = viewed(wanted, lambda t: t.view(tuple(sizes)))
            assert found is not None
            return found
        return self.f.common(dtype, sizes)

    def kept(self, node: Node, result: Any) -> Any:
        """What to remember of a node: what several read is computed once."""
        if not isinstance(result, Lazy):
            return result
        several = len(node.users) > 1 and result.cost > CHEAP
        return self.f.settled(result) if several or result.cost > LONGEST else result

    # order

    def before_write(self, home: str, writer: Node) -> None:
        """What still has to be read of `home` as it is, is read now."""
        for node, found in list(self.env.items()):
            last = 1 if node in writer.all_input_nodes else 0  # who writes it may read it once more
            if self.left.get(node, 0) <= last or node.op == "placeholder":
                continue
            if not isinstance(found, (Value, Lazy)) or home not in found.reads():
                continue
            count = torch.Size(found.sizes).numel()
            if count > LARGEST_COPY:
                raise Unsupported(f"{node} is read after what it lies in was written")
            kept = self.f.own(found.dtype, found.sizes)
            self.f.store(found, kept)
            self.env[node] = kept

    # graphs

    def run(self, graph: Graph, handle: Callable[[Scope, Node], Any]) -> list[Any]:
        """Write every node; gives the output's arguments as nodes."""
        self.left = {n: len(n.users) for n in graph.nodes}
        for node in graph.nodes:
            if node.op == "output":
                return (
                    list(node.args[0])
                    if isinstance(node.args[0], (list, tuple))
                    else [node.args[0]]
                )  # type: ignore[list-item, arg-type]
            if node.op == "placeholder":
                continue
            if node.target is operator.getitem and isinstance(
                self.env.get(node.args[0]), (list, tuple)
            ):  # type: ignore[arg-type]
                self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
            elif (node.op == "call_function" and node.users) or _writes(node):
                try:
                    self.env[node] = self.kept(node, handle(self, node))
                except Unsupported as error:
                    raise Unsupported(_placed(str(error), node)) from None
            for read in node.all_input_nodes:
                self.left[read] -= 1
        return []


def viewed(value: Value, view: Callable[[torch.Tensor], Any]) -> Any:
    """A view of a value (or several, in a list); None where it would be a copy. `view` is told on a tensor without
    memory."""
    ghost = torch.empty_strided(value.sizes, value.strides, dtype=torch.uint8, device="meta")
    try:
        found = view(ghost)
    except RuntimeError:
        return None
    several = isinstance(found, (list, tuple))
    made = []
    for each in found if several else [found]:
        if each.untyped_storage()._cdata != ghost.untyped_storage()._cdata:
            return None
        sizes, strides = tuple(each.shape), tuple(each.stride())
        at = value.offset + each.storage_offset()
        made.append(Value(value.base, value.dtype, sizes, strides, at, value.home))
    return made if several else made[0]


def dtype_of(node: Node) -> str:
    """A node's dtype by its short name."""
    fake = tensor(node)
    if fake is None or fake.dtype not in DTYPE_NAMES:
        raise Unsupported(f"{node} is no tensor of a dtype that regions know")
    return DTYPE_NAMES[fake.dtype]


def writes_cache(node: Node) -> bool:
    """Whether an op writes a packed cache where it lies."""
    target = node.target
    ours = node.op == "call_function" and getattr(target, "namespace", "") in ("sits", "sits_cpp")
    return ours and target._schema.name.endswith("::kv_attention_")  # type: ignore[union-attr]


def _writes(node: Node) -> bool:
    return (
        writes_cache(node)
        or node.target is torch.ops.aten.copy_.default
        or node.target is torch.ops.higher_order.invoke_subgraph
    )


def _placed(why: str, node: Node) -> str:
    where = module_path(node)
    return f"{why} at {where}" if where and " at " not in why else why


__all__ = [
    "LARGEST_COPY",
    "Operand",
    "Scope",
    "Sym",
    "Unsupported",
    "dtype_of",
    "viewed",
    "writes_cache",
]
