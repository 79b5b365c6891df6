"""`release: true`: once a graph has its packed weights, the originals that nothing else reads are given back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.packed import Layout, unpack
from ..graph.released import Released, cool, release
from .product import Product
from .weights import Folded, Hoisted, written


def release_packed(
    model: nn.Module,
    product: Product,
    args: Sequence[Any],
    wanted: Callable[[Tensor], bool],
    read: set[int],
) -> tuple[int, list[Tensor]]:
    """Give back the parameters that `product` has packed, of those that are `wanted`. args: the graph's arguments;
    read: ids of the parameters that graphs read as they are, to which this graph's are added.

    Returns how many, and those that stay because they are read.
    """
    everything = [*product.attached, *args]
    read |= {id(args[i]) for i in product.keep if isinstance(args[i], nn.Parameter)}
    read |= {id(everything[i]) for h in product.hoisted if not h.packed for i in h.sources}
    done, stay, ids = 0, list[Tensor](), set[int]()
    for hoisted in product.hoisted:
        weight = everything[hoisted.sources[0]] if hoisted.packed else None
        again = _restorer(hoisted, weight)
        if again is None or not isinstance(weight, nn.Parameter) or not wanted(weight):
            continue
        if id(weight) in read:
            stay.append(weight)
            cool(weight)
        elif type(weight) is not Released:
            release(weight, again)
            ids.add(id(weight))
            done += 1
    _touch(model, ids)
    return done, stay


def _restorer(hoisted: Hoisted, weight: Any) -> Callable[[], Tensor] | None:
    """How to compute a weight from what was packed of it; None where it was not packed as it is."""
    if weight is None or hoisted.folded.result is None:
        return None
    nodes = [n for n in written(hoisted)[0].graph.nodes if n.op == "call_function"]
    if len(nodes) != 1 or nodes[0].target is not torch.ops.sits.pack.default:
        return None
    scheme, group, low = nodes[0].args[1:4]
    n, k = weight.shape
    return functools.partial(_plain, hoisted.folded, n, k, Layout(scheme, group, low))


def _plain(folded: Folded, n: int, k: int, layout: Layout) -> Tensor:
    assert folded.result is not None
    return unpack(folded.result, n, k, layout)


def _touch(model: nn.Module, ids: set[int]) -> None:
    """Write released weights into their modules again, so that whoever watches the model looks."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if id(weight) in ids:
                module._parameters[name] = weight
