"""After an edit whose values lie otherwise in memory: what reads them is computed again, outputs stay as they were.

Strides are part of what a caller sees. A layout that changes inside the graph must not reach its outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ..graph.build import Builder
from ..graph.facts import same_shape, storage_root, tensor, val
from .check import Refusal
from .view import GraphView

if TYPE_CHECKING:
    from .edit import Edit

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
ABSOLUTE = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)


def relay(edit: Edit, view: GraphView, mode: FakeTensorMode) -> Refusal | None:
    """Carry new strides through the graph; at its outputs, copy back to the old ones. What is done is noted in the
    edit, so that undoing it restores all. A refusal means that the edit must be undone."""
    changed = {new for old, new in edit.pairs if not _alike(val(old), val(new))}
    todo = {reader for node in changed for reader in view.users(node)} - set(edit.made)
    ends = changed & set(edit.made)  # what was there before is returned as it was
    while todo:
        node = min(todo)
        todo.remove(node)
        if node.op == "output":
            continue
        try:
            value = _recomputed(node, edit, mode)
        except Exception as error:  # whatever an op raises on these strides
            return Refusal("alias", f"{node.name} reads it as it lies in memory", str(error)[:200])
        if _alike(val(node), value):
            continue
        edit.values.append((node, val(node)))
        node.meta["val"] = value
        ends.add(node)
        todo.update(view.users(node))
    return _restore(edit, view, mode, ends)


def _alike(a: Any, b: Any) -> bool:
    """Whether two values have the same strides, as far as can be proved."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_shape(a.stride(), b.stride())
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(same_shape(x.stride(), y.stride()) for x, y in pairs if isinstance(x, torch.Tensor))


def _recomputed(node: Node, edit: Edit, mode: FakeTensorMode) -> Any:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target in ABSOLUTE or target._schema.is_mutable:
            raise ValueError(f"{target} depends on the strides of its argument")
        if (
            torch.Tag.data_dependent_output in target.tags
            or torch.Tag.dynamic_output_shape in target.tags
        ):
            raise ValueError(f"the shape of {target} is known only when it runs")
    elif not callable(target) or isinstance(target, torch._ops.HigherOrderOperator):
        raise ValueError(f"{target} is no plain op")
    if target in VIEWS:  # its elements may be too far apart now
        edit.targets.append((node, target))
        node.target = target = aten.reshape.default
    with mode, torch.no_grad():
        return target(*map_arg(node.args, val), **map_arg(node.kwargs, val))


def _restore(edit: Edit, view: GraphView, mode: FakeTensorMode, ends: set[Node]) -> Refusal | None:
    output = view.graph.output_node()
    returned = [node for node in output.all_input_nodes if node in ends]
    before = {new: val(old) for old, new in edit.pairs} | dict(reversed(edit.values))
    for node in returned:
        shared = [n for n in output.all_input_nodes if storage_root(n) is storage_root(node)]
        old = before[node]
        if len(shared) > 1 or tensor(node) is None or not old.is_contiguous():
            return Refusal(
                "alias", f"{node.name} is an output of the graph and would lie otherwise in memory"
            )
        with view.graph.inserting_before(output):
            builder = Builder(view.graph, mode, node)
            kept = builder.call("aten.clone", (node,), {"memory_format": torch.contiguous_format})
        view.add(kept)
        edit.made.append(kept)
        edit.moved.append((node, kept, output))
        output.replace_input_with(node, kept)
    return None
