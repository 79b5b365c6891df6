"""The weight store: values folded from parameters, computed once and never used stale.

A `fold:` puts its arithmetic into the graph. `hoist` takes what depends on parameters alone out again and gives
the graph the finished value; `Folded.value` looks, before every call, whether a parameter has changed: another
tensor, another version, another address, or other contents (a write through `.data` moves none of the first three).
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..graph.capture import Captured
from ..graph.packed import error_of
from ..graph.released import Released, ReleasedError, is_released
from ..rewrite.engine import Applied
from . import packed_files as _packed_files  # noqa: F401  keeps packed weights on disk

Stamp = tuple[int, int, int]


@dataclass
class Folded:
    """One folded value: how to compute it, from which parameters, and what they looked like then.

    Shared by every graph that folds the same parameters in the same way.
    """

    compute: Callable[..., torch.Tensor]
    sources: tuple[weakref.ref[torch.Tensor], ...] = ()
    stamps: tuple[Stamp, ...] = ()
    result: torch.Tensor | None = None
    refreshed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def value(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """The folded value for the parameters as they are now."""
        with self.lock:
            same = len(self.sources) == len(params) and all(
                ref() is p for ref, p in zip(self.sources, params, strict=True)
            )
            if any(map(is_released, params)):
                if self.result is None or not same:
                    raise ReleasedError(
                        "a weight must be packed again and was released: sitsopt.restore(model)"
                    )
                return self.result
            now = tuple(stamp(p) for p in params)
            if self.result is None or not same or now != self.stamps:
                with torch.no_grad():
                    self.result = self.compute(*params)
                self.sources = tuple(weakref.ref(p) for p in params)
                self.stamps, self.refreshed = now, self.refreshed + 1
            return self.result


@dataclass
class Watch:
    """The folded values of one graph, and what its parameters looked like when they were right.

    Packed weights come from most of a model's bytes, so before a call these are not read again in full: their
    versions, addresses and a few words of each are (`sits_cpp::stamp`, some 0.1 us a parameter).
    """

    seen: int | None = None
    kept: list[torch.Tensor] = field(default_factory=list)

    def values(self, hoisted: list[Hoisted], args: Sequence[Any]) -> list[torch.Tensor]:
        """One value for each of `hoisted`, for the arguments as they are now."""
        packed = [h.packed for h in hoisted]
        now = None
        if any(packed):
            sources = [args[i] for h in hoisted if h.packed for i in h.sources]
            sources = [t for t in sources if type(t) is not Released]
            now = glance(sources)
        if all(packed) and now is not None and now == self.seen:
            return self.kept
        quick = now is not None and now == self.seen
        values = [
            self.kept[at] if quick and h.packed else h.folded.value([args[i] for i in h.sources])
            for at, h in enumerate(hoisted)
        ]
        self.kept, self.seen = values, now
        return values


def glance(tensors: list[torch.Tensor]) -> int | None:
    """Version, address and some words of each tensor, as one number; None where there are no kernels."""
    found = _glance_op()
    if found is None:
        return None
    return found(tensors) if tensors else 0


@functools.cache
def _glance_op() -> Any:
    from . import kernels

    return torch.ops.sits_cpp.stamp.default if kernels.availability()[0] else None


def stamp(tensor: torch.Tensor) -> Stamp:
    """Version, address and a checksum of the contents: one read of the tensor, in rows, so that moved rows show.

    Two contents may share a checksum only if every row of 64-bit words keeps its sum.
    """
    version = 0 if tensor.is_inference() else tensor._version
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    rows = words[: words.numel() // 256 * 256].view(-1, 256).sum(1)
    rest = words[rows.numel() * 256 :]
    tail = flat[words.numel() * 8 :]
    digest = hash((rows.numpy().tobytes(), rest.numpy().tobytes(), tail.numpy().tobytes()))
    return version, tensor.data_ptr(), digest


_LOCK = threading.Lock()
_STORE: weakref.WeakValueDictionary[tuple[Any, ...], Folded] = weakref.WeakValueDictionary()


@dataclass
class Hoisted:
    """A value taken out of a graph: which placeholders it is computed from, and where it comes in."""

    folded: Folded
    sources: list[int]  # indices into Captured.placeholders
    placeholder: Node | None
    root: Node | None  # what the value was in the graph
    packed: bool  # from a whole weight, which is not read in full before every call


def hoist(captured: Captured) -> list[Hoisted]:
    """Replace what a fold computes from parameters by a new input each; returns how to fill these."""
    index = {node: i for i, node in enumerate(captured.placeholders)}
    hoisted = []
    for root in _roots(captured, index):
        nodes, sources = _cone(root, index)
        module = _extract(root, nodes, sources)
        packed = root.target is torch.ops.sits.pack.default
        folded = _shared(module, [captured.inputs[index[s]] for s in sources])
        with captured.gm.graph.inserting_before(_first_call(captured.gm.graph)):
            place = captured.gm.graph.placeholder(f"folded_{root.name}")
        place.meta.update(root.meta)
        root.replace_all_uses_with(place)
        hoisted.append(Hoisted(folded, [index[s] for s in sources], place, root, packed))
    captured.gm.graph.eliminate_dead_code()
    return hoisted


def note_errors(applied: Sequence[Applied], hoisted: Sequence[Hoisted]) -> None:
    """At each site whose weight was packed, how far the packed weight is from the original."""
    results = {h.root: h.folded.result for h in hoisted}
    for item in applied:
        found = (results.get(n) for n in (item.edit.made if item.edit else ()))
        errors = [error_of(t) for t in found if t is not None]
        item.site.weight_error = next((e for e in errors if e is not None), None)


def written(hoisted: Hoisted) -> tuple[GraphModule, list[int], bool]:
    """What another process needs to fold the same value: how to compute it, from which arguments, whether packed."""
    module: GraphModule = getattr(hoisted.folded.compute, "__self__")  # noqa: B009  a bound forward
    return module, hoisted.sources, hoisted.packed


def revived(module: GraphModule, sources: list[int], packed: bool) -> Hoisted:
    """The reverse of `written`; `share` it once its arguments are known."""
    return Hoisted(Folded(module.forward), sources, None, None, packed)


def share(hoisted: Sequence[Hoisted], args: Sequence[Any]) -> None:
    """Let revived values be those that other graphs of this process fold from the same parameters."""
    for each in hoisted:
        module, sources, _ = written(each)
        each.folded = _shared(module, [args[i] for i in sources])


def _roots(captured: Captured, index: dict[Node, int]) -> list[Node]:
    """Folded nodes that the rest of the graph reads, and that depend on parameters alone."""
    known: dict[Node, bool] = {}
    roots = []
    for node in captured.gm.graph.nodes:
        if node in index:
            known[node] = node in captured.params
        elif node.op == "call_function":
            folded = "sits_fold" in node.meta
            known[node] = folded and all(known.get(n, False) for n in node.all_input_nodes)
    for node, constant in known.items():
        if constant and node not in index and any(not known.get(u, False) for u in node.users):
            roots.append(node)
    return roots


def _cone(root: Node, index: dict[Node, int]) -> tuple[list[Node], list[Node]]:
    """Everything a value is computed from: ops in graph order, and the parameters they start from."""
    todo, nodes, sources = [root], set(), set()
    while todo:
        node = todo.pop()
        if node in index:
            sources.add(node)
        elif node not in nodes:
            nodes.add(node)
            todo.extend(node.all_input_nodes)
    return sorted(nodes), sorted(sources)


def _extract(root: Node, nodes: list[Node], sources: list[Node]) -> GraphModule:
    graph, copies = Graph(), {}
    for i, source in enumerate(sources):
        copies[source] = graph.placeholder(f"p{i}")
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta.clear()
    graph.output(copies[root])
    return GraphModule({}, graph)


def _shared(module: GraphModule, params: list[torch.Tensor]) -> Folded:
    key = (hashlib.sha256(_meaning(module.graph).encode()).hexdigest(), *(id(p) for p in params))
    with _LOCK:
        found = _STORE.get(key)
        if found is None or not all(r() is p for r, p in zip(found.sources, params, strict=False)):
            found = _STORE[key] = Folded(module.forward)
        return found


def _meaning(graph: Graph) -> str:
    """A graph as text without the names of its nodes, which do not outlive a way through the disk."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    parts = ((n.op, n.target, map_arg((n.args, n.kwargs), number.__getitem__)) for n in number)
    return "\n".join(f"{op} {target} {args}" for op, target, args in parts)


def _first_call(graph: Graph) -> Node:
    return next(n for n in graph.nodes if n.op != "placeholder")
