"""How long a site takes on a target by the cost model: as one kernel an op, and as it was rewritten."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.fx import Node

from ..graph.facts import DTYPE_NAMES, is_view, tensor, traffic, val
from ..graph.opview import key_of
from ..spec.target import Target
from .cost import Work, linear_flops, predict_us, serial_us
from .record import Site

ATTENTION = {"aten.scaled_dot_product_attention", "sits.attention"}


class Forecast:
    """Costs of the nodes of one graph. Layers repeat: each node and each set of equal nodes is worked out once."""

    def __init__(self, target: Target | None) -> None:
        self.target = target
        self.works: dict[Node, Work] = {}
        self.like: dict[
            Any, tuple[Work, Any]
        ] = {}  # by op and fake values, which equal layers share
        self.times: dict[Any, tuple[float | None, float | None]] = {}

    def of(self, nodes: Iterable[Node]) -> list[Work]:
        """What each op costs as a kernel of its own. To be asked before the ops are erased, which drops their
        arguments; that a reader gets an equal value from elsewhere changes nothing."""
        found = []
        for node in nodes:
            if node.op == "call_function" and not is_view(node):
                known = self.works.get(node)
                if known is None:
                    known = self.works[node] = self._work(node)
                found.append(known)
        return found

    def _work(self, node: Node) -> Work:
        values = (val(node), *map(val, node.all_input_nodes))
        key = node.target, tuple(map(id, values))
        if key not in self.like:
            self.like[key] = work(node), values  # kept, so that no other value gets its id
        return self.like[key][0]

    def predict(self, site: Site, before: Sequence[Work], kernels: int) -> None:
        """Fill in the two times of a site: an op a kernel, and the same arithmetic with the bytes and kernels of
        after. They stay None where a size is symbolic or a fact of the target unknown."""
        if self.target is None:
            return
        plain = all(type(w.bytes) is int and type(w.flops) is int for w in before)
        key = (*before, site.bytes_after, kernels) if plain else None  # symbolic sizes have no hash
        found = self.times.get(key) if key else None
        if found is None:
            found = _times(before, site.bytes_after, kernels, self.target)
            if key:
                self.times[key] = found
        site.unfused_us, site.predicted_us = found


def bytes_moved(works: Iterable[Work]) -> int | None:
    """Bytes that ops move when each runs alone; None when a size is symbolic."""
    total = sum((w.bytes for w in works), 0)
    return total if isinstance(total, int) else None


def _times(
    before: Sequence[Work], bytes_after: int | None, kernels: int, target: Target
) -> tuple[float | None, float | None]:
    unfused = serial_us(before, target)
    if bytes_after is None:
        return unfused, None
    heaviest = max(before, key=lambda w: w.flops if isinstance(w.flops, int) else 0, default=Work())
    after = Work(bytes_after, sum(w.flops for w in before), kernels, heaviest.dtype)
    return unfused, predict_us(after, target)


def work(node: Node) -> Work:
    """What one op costs when it is a kernel of its own."""
    value = tensor(node)
    source = next((t for n in node.all_input_nodes if (t := tensor(n)) is not None), value)
    dtype = DTYPE_NAMES.get(source.dtype, "f32") if source is not None else "f32"
    return Work(traffic(node), flops(node), 1, dtype)


def flops(node: Node) -> Any:
    """Operations of the ops in which they count: matrix products and attention. The rest is bound by memory."""
    key = key_of(node)
    if key in ATTENTION:
        q, k, v = (tensor(n) for n in node.args[:3])
        if q is None or k is None or v is None:
            return 0
        pairs = q.shape[0] * q.shape[1] * q.shape[-2] * k.shape[-2]
        return 2 * pairs * (q.shape[-1] + v.shape[-1])
    if key == "sits.linears":
        return sum(_linear(node.args[0], w) for w in node.args[1])  # type: ignore[union-attr]
    if key in ("aten.linear", "sits.linear_act"):
        return _linear(node.args[0], node.args[1])
    if key in ("aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"):
        return _product(node, node.args[1 if "add" in key else 0])
    if key in ("aten.conv2d", "aten.convolution", "sits.conv_act"):
        return _convolution(node)
    return 0


def _linear(x: Any, weight: Any) -> Any:
    a, w = tensor(x), tensor(weight)
    if a is None or w is None:
        return 0
    return linear_flops(a.numel() // max(1, w.shape[1]), w.shape[1], w.shape[0])


def _product(node: Node, left: Any) -> Any:
    out, a = tensor(node), tensor(left)
    return 0 if out is None or a is None else 2 * out.numel() * a.shape[-1]


def _convolution(node: Node) -> Any:
    out, weight = tensor(node), tensor(node.args[1])
    return 0 if out is None or weight is None else 2 * out.numel() * weight[0].numel()
