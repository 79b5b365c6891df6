"""Dynamo's graph to a functional ATen graph in which linear, attention, norms and activations are still whole.

`aot_export_module(pre_dispatch=True, decompositions={})` keeps composite ops; mutations of inputs come back as extra
outputs, which `restore` turns into `copy_` at the end, so that the graph keeps Dynamo's calling convention.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_module
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from .facts import is_view, schema_mutates, storage_root, tensor, val
from .layouts import Unsuited
from .samples import sampled

aten = torch.ops.aten


class CannotCapture(Exception):
    """The graph must be run as it came; the message says why."""


class OnlyEager(CannotCapture):
    """A write that no compiler is known to get right."""


@dataclass
class Captured:
    """A functional graph. `placeholders[i]` stands for `inputs[i]`; the first `attached` of them are attributes of
    Dynamo's graph module, the rest its arguments. `written` are the placeholders that the call updates: their
    new values are the last outputs of the graph, in this order, until `restore`."""

    gm: GraphModule
    placeholders: list[Node]
    inputs: list[Any]
    params: set[Node]
    written: list[Node]
    attached: int = 0
    whole: str = ""  # why it was traced node by node, where it was


PASS_THROUGH = {
    "_enter_autocast": "an autocast region inside the graph",
    "_exit_autocast": "an autocast region inside the graph",
    "tag_activation_checkpoint": "activation checkpointing",
    "invoke_subgraph": "a nested compile region",
    "wrap": "a nested region",
    "_vmap_increment_nesting": "a function transform",
    "_grad_increment_nesting": "a function transform",
    "_jvp_increment_nesting": "a function transform",
    "_func_increment_nesting": "a function transform",
}
# The gradient of these is not that of the ops inside them.
OWN_GRADIENT = {
    "autograd_function_apply": "an autograd function with a gradient of its own",
    "register_hook": "a hook on a gradient",
    "trace_wrapped": "a hook on a gradient",
}


def capture(gm: GraphModule, inputs: Sequence[Any]) -> Captured:
    """Functionalize a Dynamo graph. Raises CannotCapture with the reason where that would not be safe."""
    _refuse(gm, inputs)
    _settle_dropout(gm)
    try:
        graph, written = sampled(gm, inputs)
        return _captured(gm, inputs, graph, written)
    except Unsuited as reason:
        graph, written = _whole(gm, inputs)
        return _captured(gm, inputs, graph, written, str(reason))


def _whole(gm: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, list[Node]]:
    """The graph traced node by node, and the placeholders it writes; their new values are its last outputs."""
    try:
        graph, signature = aot_export_module(
            gm, list(inputs), trace_joint=False, pre_dispatch=True, decompositions={}
        )
    except Exception as error:
        if "aliased inputs that are mutated" in str(error):
            raise OnlyEager("inputs that share memory are written to") from error
        raise CannotCapture(f"functionalization failed: {_first_line(error)}") from error
    assert isinstance(graph, GraphModule)
    return graph, _written(graph, signature)


def _captured(
    gm: GraphModule, inputs: Sequence[Any], graph: GraphModule, written: list[Node], whole: str = ""
) -> Captured:
    sources = [getattr(n, "_dynamo_source", None) for n in gm.graph.nodes if n.op == "placeholder"]
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    attached = [
        *gm.named_parameters(remove_duplicate=False),
        *gm.named_buffers(remove_duplicate=False),
    ]
    extra: list[Any] = list(dict(attached).values())
    if len(placeholders) != len(extra) + len(inputs):
        raise CannotCapture("effect tokens in the graph")
    _settle_results(graph, written)
    values = [*extra, *inputs]
    origin = [None] * len(extra) + list(sources)
    params = {
        p for p, v, s in zip(placeholders, values, origin, strict=True)
        if isinstance(v, nn.Parameter) or (isinstance(v, torch.Tensor) and _of_module(s))
    }  # fmt: skip
    captured = Captured(
        graph, placeholders, values, params - set(written), written, len(extra), whole
    )
    _normalize(captured)
    return captured


def _refuse(gm: GraphModule, inputs: Sequence[Any]) -> None:
    for node in gm.graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        if name in PASS_THROUGH:
            raise CannotCapture(f"{PASS_THROUGH[name]} ({name})")
        if _writes(node) and _overlaps(node.kwargs.get("out") or next(iter(node.args), None)):
            raise OnlyEager(f"{name} writes to an expanded tensor, in which several places are one")
        if name in OWN_GRADIENT and _differentiated(node):
            raise CannotCapture(f"{OWN_GRADIENT[name]} ({name})")
        if "batch_norm" in name and node.op == "call_function" and torch.is_grad_enabled():
            training = node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False)
            if training is True:
                raise CannotCapture(
                    "batch norm in training updates its statistics inside the graph"
                )
    plain = (torch.Tensor, nn.Parameter, nn.Buffer, torch._subclasses.FakeTensor)
    for value in inputs:
        if isinstance(value, torch.Tensor) and type(value) not in plain:
            raise CannotCapture(f"an input is a tensor subclass ({type(value).__name__})")


def _overlaps(written: Any) -> bool:
    value = written.meta.get("example_value") if isinstance(written, Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    dims = zip(value.shape, value.stride(), strict=True)
    return any(type(stride) is int and stride == 0 and size != 1 for size, stride in dims)


def _differentiated(node: Node) -> bool:
    leaves = tree_leaves(node.meta.get("example_value"))
    return torch.is_grad_enabled() or any(getattr(t, "requires_grad", False) for t in leaves)


IN_PLACE = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor",
                                    "lshift", "rshift", "matmul")} | {"setitem"}  # fmt: skip
DROPOUTS = {nn.functional.dropout, torch.dropout}


def _settle_dropout(gm: GraphModule) -> None:
    """Dropout that drops nothing gives back its input, which its schema does not say: in a graph that writes anything
    its readers read the input itself, or they would miss what is written to it."""
    if not any(map(_writes, gm.graph.nodes)):
        return
    for node in list(gm.graph.nodes):
        if node.target in DROPOUTS and node.args and _drops_nothing(*node.args[1:3], **node.kwargs):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()


def _drops_nothing(
    p: Any = 0.5, training: Any = True, inplace: Any = False, train: Any = True
) -> bool:
    return p == 0.0 or training is False or train is False


def _writes(node: Node) -> bool:
    """Whether a node of Dynamo's graph may write one of its arguments, told by its name; rather once too often."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_method":
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    flags = node.kwargs.get("out") is not None or node.kwargs.get("inplace") is True
    functional = getattr(node.target, "__module__", "") == "torch.nn.functional"
    named = name.endswith("_") or (
        name in IN_PLACE and node.target is getattr(operator, name, None)
    )
    return named or flags or schema_mutates(node.target) or (functional and True in node.args)


def _of_module(source: Any) -> bool:
    """Whether Dynamo found a tensor as an attribute of a module (a buffer) rather than as an argument."""
    if source is None:
        return False
    try:
        guard = source.guard_source if not callable(source.guard_source) else source.guard_source()
    except NotImplementedError:
        return False
    return "NN_MODULE" in guard.name  # specialized or not, of PyTorch or the user's own


def _written(graph: GraphModule, signature: Any) -> list[Node]:
    """Move the outputs that stand for mutated inputs behind the user's; return the placeholders they belong to."""
    by_name = {n.name: n for n in graph.graph.nodes if n.op == "placeholder"}
    named = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    by_fqn = {fqn: n for n, fqn in named.items()}
    output = graph.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    mutated = (signature.buffers_to_mutate, getattr(signature, "parameters_to_mutate", {}),
               signature.user_inputs_to_mutate)  # fmt: skip
    names = {out: name for group in mutated for out, name in group.items()}
    news, rest = results[: len(names)], results[len(names) :]
    if any(node.name not in names for node in news):
        raise CannotCapture("mutated inputs do not line up with outputs")
    output.args = ((*rest, *news),)
    return [by_name[by_fqn.get(names[node.name], names[node.name])] for node in news]


def _settle_results(graph: GraphModule, written: list[Node]) -> None:
    """A returned input that the graph updates is the input itself."""
    output = graph.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    count = len(results) - len(written)
    rest, news = results[:count], results[count:]
    _check_views(rest, dict(zip(written, news, strict=True)))
    back = dict(zip(news, written, strict=True))
    rest = [back.get(node, node) if isinstance(node, Node) else node for node in rest]
    output.args = ((*rest, *news),)


def _check_views(results: list[Any], written: dict[Node, Node]) -> None:
    """A result may be a view of an input's new value; `restore` makes it a view of the input. It may not share
    storage with one in any other way."""
    homes = {storage_root(node) for pair in written.items() for node in pair}
    others = [
        n for n in results if isinstance(n, Node) and n not in written and storage_root(n) in homes
    ]
    if not all(_behind(node, set(written.values())) for node in others):
        raise CannotCapture("a result shares storage with an input that the graph updates")


def _behind(node: Node, bases: set[Node]) -> list[Node]:
    """The views that lead from one of `bases` to a node, that base first; empty where none does."""
    chain = [node]
    while chain[-1] not in bases:
        node = chain[-1]
        if node.op != "call_function" or not is_view(node) or not node.all_input_nodes:
            return []
        chain.append(node.all_input_nodes[0])
    return chain[::-1]


def _normalize(captured: Captured) -> None:
    graph = captured.gm.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.op == "call_function" and node.target is aten.alias.default and _inside(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _inside(node: Node) -> bool:
    return all(user.op != "output" for user in node.users)


def restore(captured: Captured, behind: Sequence[Node] = ()) -> None:
    """Turn the trailing outputs into writes to the inputs they belong to. The new values of the inputs `behind`
    stay outputs, in that order: whoever runs the graph writes them. What is returned as a view of a new value
    becomes a view of the input."""
    graph, output = captured.gm.graph, captured.gm.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    count = len(results) - len(captured.written)
    news = dict(zip(captured.written, results[count:], strict=True))
    with graph.inserting_before(output):
        for place, new in news.items():
            if new is not place and place not in behind:
                write = graph.call_function(aten.copy_.default, (place, new))
                write.meta["val"] = place.meta["val"]
        places = {new: place for place, new in news.items()}
        views = {
            node: _on_the_input(graph, node, places) for node in dict.fromkeys(results[:count])
        }
        rest = [views[node] for node in results[:count]]
    output.args = ((*rest, *(news[p] for p in behind)),)


def _on_the_input(graph: Graph, node: Any, places: dict[Node, Node]) -> Any:
    """The same view of an input as `node` is of the input's new value; anything else as it is."""
    chain = _behind(node, set(places)) if isinstance(node, Node) else []
    if len(chain) < 2:
        return node
    copies = {chain[0]: places[chain[0]]}
    for link in chain[1:]:
        made = graph.node_copy(link, lambda n: copies.get(n, n))
        target: Any = made.target
        made.meta["val"] = target(*map_arg(made.args, val), **map_arg(made.kwargs, val))
        copies[link] = made
    base, found = tensor(places[chain[0]]), tensor(copies[node])
    same = base is not None and found is not None and torch._C._is_alias_of(base, found)  # type: ignore[attr-defined]
    return copies[node] if same else node  # in eager's layout, the view was a copy


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
