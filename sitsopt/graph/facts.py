"""Facts of one FX node: its value's shape and dtype, where in the model it comes from, who reads it."""

from __future__ import annotations

import operator
import re
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {v: k for k, v in DTYPES.items()}


def val(node: Node) -> Any:
    """The fake value capture recorded for a node (a FakeTensor, a SymInt, a tuple, or None)."""
    return node.meta.get("val")


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of a node, or None when the node holds anything else."""
    value = val(node) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def same_size(a: Any, b: Any) -> bool:
    """True when two sizes are proved equal; a symbolic size that is merely equal today is not."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


def same_shape(a: Any, b: Any) -> bool:
    """True when two shapes are proved equal."""
    if all(type(n) is int for n in a) and all(type(n) is int for n in b):
        return tuple(a) == tuple(b)
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def module_path(node: Node) -> str:
    """The dotted path of the module that ran this op, without Dynamo's wrapping; "" for plain functions."""
    stack = node.meta.get("nn_module_stack") or {}
    return clean_path(str(next(reversed(stack.values()))[0])) if stack else ""


@lru_cache(maxsize=65536)
def clean_path(name: str) -> str:
    """`L['self']._modules['model'].layers[0]` and friends as `model.layers.0`."""
    name = re.sub(r"^L\['[^']*'\](\.args\[\d+\]|\[\d+\])?", "", name)
    name = re.sub(r"_modules\['([^']+)'\]", r"\1", name)
    name = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", name)
    name = name.replace("_orig_mod", "").replace("._checkpoint_wrapped_module", "")
    return re.sub(r"\.+", ".", name).strip(".")


def source(node: Node) -> str:
    """`file:line` of the innermost frame of the user's (or the model library's) own code."""
    return _last_frame(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _last_frame(trace: str) -> str:
    at = len(trace)
    while (at := trace.rfind('File "', 0, at)) >= 0:
        found = re.match(r'File "([^"]+)", line (\d+)', trace[at:])
        if found:
            return f"{found[1]}:{found[2]}"
    return ""


def schema_mutates(target: object) -> bool:
    """Whether an op writes one of its arguments: read from its schema, never from its name."""
    known = _WRITES.get(id(target))  # hashing an op runs Python code
    if known is None or known[0] is not target:
        writes = isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)
        known = _WRITES[id(target)] = target, writes
    return known[1]


_WRITES: dict[int, tuple[object, bool]] = {}


def is_view(node: Node) -> bool:
    """Whether the output may share storage with the first argument."""
    target = node.target
    known = _VIEWS.get(id(target))  # hashing an op runs Python code
    if known is None or known[0] is not target:
        known = _VIEWS[id(target)] = target, _gives_views(target)
    return known[1]


_VIEWS: dict[int, tuple[Any, bool]] = {}


def _gives_views(target: Any) -> bool:
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target in (torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default):
        return True  # may be a view, by layout
    return any(
        a.alias_info is not None and not a.alias_info.is_write for a in target._schema.returns
    )


def storage_root(node: Node) -> Node:
    """The node that owns the storage a value may live in, following views back. Several results of one op own theirs
    each, unless they are views of its input."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        base = node.all_input_nodes[0]
        if node.target is operator.getitem and not is_view(base):
            return node
        node = base
    return node


def escapes(node: Node) -> bool:
    """Whether a value, or a view of it, is an output of the graph."""
    todo, seen = [node], set()
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return True
            if user not in seen and user.op == "call_function" and is_view(user):
                seen.add(user)
                todo.append(user)
    return False


def nbytes(value: Any) -> Any:
    """Bytes of the tensors inside a value; symbolic when sizes are."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    total: Any = 0
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            total = total + leaf.numel() * leaf.element_size()
    return total


def _is_mark(node: Node) -> bool:
    """`sits.stored`: what a recipe wants of a weight. It never runs."""
    return getattr(node.target, "__name__", "") == "stored.default"


def traffic(node: Node) -> Any:
    """Bytes one op reads and writes when it runs alone; views move nothing."""
    if node.op != "call_function" or is_view(node) or _is_mark(node):
        return 0
    if node.target is torch.ops.aten.embedding.default:
        return 2 * nbytes(val(node))
    return nbytes(val(node)) + sum((nbytes(val(n)) for n in node.all_input_nodes), 0)
