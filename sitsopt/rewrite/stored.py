"""What a recipe wants of the weights, written into the graph: before the rules of the stage `weights`, and after them.

`mark` puts `sits.stored(w, ...)` between a parameter and the linear that reads it, with the recipe's settings as its
arguments; where a rule has merged linears of one input, those with a marked weight stand alone again. A rule swaps
each of them, or says why not. `merge` then makes one call of those that share an input and a scheme, and gives
every weight that was not swapped back as it was.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from ..graph.build import Builder, fake_mode
from ..graph.facts import module_path
from ..graph.opview import canonical
from .engine import Applied
from .record import GraphRecord
from .view import GraphView

aten, sits = torch.ops.aten, torch.ops.sits
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "relu": ("aten.relu", {}),
    "silu": ("aten.silu", {}),
    "gelu": ("aten.gelu", {}),
    "gelu_tanh": ("aten.gelu", {"approximate": "tanh"}),
    "tanh": ("aten.tanh", {}),
    "sigmoid": ("aten.sigmoid", {}),
}
Settings = tuple[str, int, bool, str, str, str]  # the arguments of `sits.stored` behind the weight
# A parameter and the module that reads it, to its settings and the module's own name.
Choose = Callable[[Node, str], tuple[Settings, str] | None]


@dataclass
class Marked:
    """The marks of one graph: `stored` nodes, and what the linears that stand alone were merged in."""

    stored: list[Node] = field(default_factory=list)
    parted: dict[Node, list[Node]] = field(default_factory=dict)  # the merged call, its linears now


def mark(view: GraphView, choose: Choose) -> Marked:
    """Mark every weight of a linear for which `choose` has settings."""
    marked, mode = Marked(), fake_mode(view.gm)
    keys = [canonical(k) for k in ("aten.linear", "sits.linears", "sits.linear_act")]
    for node in view.nodes(keys):
        if node.target is sits.linears.default:
            _part(view, mode, node, choose, marked)
        elif node.target is sits.linear_act.default:
            _uncover(view, mode, node, choose, marked)
        else:
            wanted = _wanted(node.args[1], module_path(node), choose)
            if wanted:
                kept = _stored(view, mode, node, wanted, marked)
                node.update_arg(1, kept)
                view.note(node)
    return marked


def _args(node: Node) -> Any:
    """The arguments of a call, which a schema has typed."""
    return node.args


def _wanted(weight: Any, module: str, choose: Choose) -> tuple[Settings, str] | None:
    return choose(weight, module) if isinstance(weight, Node) else None


def _stored(
    view: GraphView, mode: FakeTensorMode, node: Node, wanted: tuple[Settings, str], marked: Marked,
    weight: Any = None,
) -> Node:  # fmt: skip
    weight = node.args[1] if weight is None else weight
    settings, name = wanted
    with view.graph.inserting_before(node):
        kept = Builder(view.graph, mode, node).call("sits.stored", (weight, *settings))
    _belongs(kept, name)
    view.add(kept)
    marked.stored.append(kept)
    return kept


def _take_over(view: GraphView, old: Node, new: Node) -> None:
    """Every reader of `old` reads `new`."""
    for reader in list(old.users):
        reader.replace_input_with(old, new)
        view.note_moved(reader, new)
    view.dead.add(old)


def _belongs(node: Node, module: str) -> None:
    """Of linears that were merged each says its own module again."""
    stack = dict(node.meta.get("nn_module_stack") or {})
    if module_path(node) != module:
        node.meta["nn_module_stack"] = {**stack, module: (module, torch.nn.Linear)}


def _part(
    view: GraphView, mode: FakeTensorMode, node: Node, choose: Choose, marked: Marked
) -> None:
    """`linears` with a marked weight: each marked one as a `linear`, the others as `linears` still."""
    x, weights, biases = _args(node)
    wanted = [_wanted(w, module_path(node), choose) for w in weights]
    if not any(wanted):
        return
    made: dict[int, Node] = {}
    rest = [i for i, one in enumerate(wanted) if one is None]
    for i, one in enumerate(wanted):
        if one is not None:
            weight = _stored(view, mode, node, one, marked, weights[i])
            with view.graph.inserting_before(node):
                made[i] = Builder(view.graph, mode, node).call(
                    "aten.linear", (x, weight, biases[i])
                )
            _belongs(made[i], one[1])
            view.add(made[i])
    marked.parted[node] = list(made.values())
    if rest:
        with view.graph.inserting_before(node):
            builder = Builder(view.graph, mode, node)
            lists = ([weights[i] for i in rest], [biases[i] for i in rest])
            call = builder.call("sits.linears", (x, *lists))
            made.update({i: builder.item(call, at) for at, i in enumerate(rest)})
        for new in builder.made:
            view.add(new)
    for item in view.users(node):
        _take_over(view, item, made[_args(item)[1]])
    view.dead.add(node)


def _uncover(
    view: GraphView, mode: FakeTensorMode, node: Node, choose: Choose, marked: Marked
) -> None:
    """`linear_act` with a marked weight as a linear and its activation."""
    x, w, b, act = node.args
    wanted = _wanted(w, module_path(node), choose)
    if not wanted:
        return
    kept = _stored(view, mode, node, wanted, marked)
    name, kwargs = ACTIVATIONS[str(act)]
    with view.graph.inserting_before(node):
        builder = Builder(view.graph, mode, node)
        linear = builder.call("aten.linear", (x, kept, b))
        result = builder.call(name, (linear,), kwargs)
    for new in builder.made:
        view.add(new)
    _take_over(view, node, result)
    marked.parted[node] = [linear]


def merge(view: GraphView, marked: Marked, applied: Sequence[Applied]) -> None:
    """One call for the packed linears of one input and scheme; marks that no rule took are gone."""
    for node in marked.stored:
        if node not in view.dead:
            for user in view.users(node):
                user.replace_input_with(node, _args(node)[0])
            view.dead.add(node)
    groups: dict[Any, list[Node]] = defaultdict(list)
    mode = fake_mode(view.gm)
    calls = view.nodes([canonical("sits.packed_linears")])
    for node in calls:
        groups[(node.args[0], *node.args[4:])].append(node)
    became = {}
    for group in groups.values():
        for part in _together(group):
            one = _joined(view, mode, part) if len(part) > 1 else part[0]
            became.update(dict.fromkeys(part, one))
    for item in applied:
        if item.edit is not None:
            item.edit.made += [
                became[n] for n in item.edit.made if n in became and became[n] is not n
            ]
    _tell_merged(marked, applied, became)


def _together(group: list[Node]) -> Iterable[list[Node]]:
    """Calls in graph order that may become one where the first stands: what the later ones read is there already."""
    part: list[Node] = []
    for node in sorted(group):
        reads = [
            n for n in node.all_input_nodes if n.op == "call_function" and "sits_fold" not in n.meta
        ]
        if part and any(n > part[0] for n in reads):
            yield part
            part = []
        part.append(node)
    yield part


def _joined(view: GraphView, mode: FakeTensorMode, part: list[Node]) -> Node:
    """The calls as one, behind the last of their folded weights; reads nothing that came later than the first."""
    lists: list[list[Any]] = [[], [], []]
    for node in part:
        for whole, one in zip(lists, _args(node)[1:4], strict=True):
            whole.extend(one)
    for folded in (n for node in part[1:] for n in _args(node)[1]):
        _lift(folded, part[0])
    with view.graph.inserting_before(part[0]):
        builder = Builder(view.graph, mode, part[0])
        one = builder.call("sits.packed_linears", (part[0].args[0], *lists, *part[0].args[4:]))
        at = 0
        for node in part:
            for item in view.users(node):
                if item.target is operator.getitem:
                    _take_over(view, item, builder.item(one, at + _args(item)[1]))
            at += len(_args(node)[1])
            view.dead.add(node)
    for new in builder.made:
        view.add(new)
    return one


def _lift(node: Node, before: Node) -> None:
    """Move what is folded from parameters alone in front of `before`."""
    if node.op != "call_function" or node < before:
        return
    for source in node.all_input_nodes:
        _lift(source, before)
    before.prepend(node)


def left_alone(marked: Marked, record: GraphRecord) -> dict[str, str]:
    """The modules whose weight no rule took, and why: the near miss, where misses are recorded."""
    taken = {
        name for site in record.sites if site.rule.startswith("weights/") for name in site.took
    }
    said = {m.place.module: m for m in record.misses if m.rule.startswith("weights/")}
    left = {}
    for node in marked.stored:
        if node.name not in taken:
            miss = said.get(module_path(node))
            why = f"{miss.condition or miss.reason}: {miss.explanation}" if miss else "no rule fits"
            left[module_path(node)] = why
    return left


def _tell_merged(marked: Marked, applied: Sequence[Applied], became: dict[Node, Node]) -> None:
    """Sites of rules that merged linears now run as the packed call that took their place."""
    made = {n: item for item in applied if item.edit is not None for n in item.edit.made}
    by_anchor = {item.match.anchor: item.edit for item in applied if item.edit is not None}
    for old, linears in marked.parted.items():
        site = made.get(old)
        if site is None or site.edit is None:
            continue
        for linear in linears:
            edit = by_anchor.get(linear)
            site.edit.made += edit.made if edit is not None else [linear]
