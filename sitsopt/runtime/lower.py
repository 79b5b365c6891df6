"""From a rewritten graph to a callable: kernels for the ops that have one, Inductor for the rest.

A `sits::` op without a kernel stays as it is: AOTAutograd traces its reference and Inductor fuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph.capture import Captured, restore
from ..graph.facts import tensor
from ..graph.repeat import outline
from ..rewrite.engine import Applied
from ..rewrite.record import OneFunction, Site
from .candidates import Chosen, candidates
from .kv.in_place import write_in_place
from .patterns import inductor_patches
from .product import Compiled, Product, fold
from .profit import Times, worth
from .region.choose import chosen
from .triton.choose import interpreted
from .weights import Hoisted, Watch, hoist
from .writes import Behind, written_behind

aten = torch.ops.aten


@dataclass
class Lowering:
    """How to lower: `auto` or `inductor` (no kernels of ours), `eager` (no compiler at all), `interpret` (generated
    Triton texts in the interpreter, eager for the rest); options for Inductor; repeat: whether equal layers become
    one subgraph; profitability: `measure` or `model` keeps a kernel where it is faster than what it
    replaces, as measured or by the cost model; regions: whether a decode step on a CPU becomes one function."""

    how: str = "auto"
    grad: bool = False
    inductor: dict[str, Any] = field(default_factory=dict)
    repeat: bool = True
    profitability: str = "always"
    regions: bool = False

    @property
    def compiles(self) -> bool:
        """Whether Inductor compiles what is left."""
        return self.how not in ("eager", "interpret")


def choose_kernels(
    captured: Captured,
    applied: Sequence[Applied],
    lowering: Lowering,
    kernel: Callable[[Node], Chosen] | None = None,
) -> None:
    """Point each `sits::` op at its kernel, and note at every site how it will run and why. `kernel` answers instead
    of the kernels of this machine, for one node: by whom it is lowered, and why."""
    nodes = [n for n in captured.gm.graph.nodes if _ours(n)]
    default = "inductor" if lowering.compiles else "eager"
    times: dict[Node, Times] = {}
    if lowering.how in ("eager", "inductor"):
        chosen = dict.fromkeys(nodes, (lowering.how, f"lowering: {lowering.how}"))
    elif lowering.grad:
        why = "gradients are recorded: the reference is differentiable, kernels are not"
        chosen = dict.fromkeys(nodes, (default, why))
    elif lowering.how == "interpret":
        chosen = {node: interpreted(node) for node in nodes}
    elif kernel is not None:
        chosen = {node: kernel(node) for node in nodes}
    else:
        chosen, times = _kernels_here(nodes, captured, applied, lowering)
    for item in applied:
        made = item.edit.made if item.edit else item.claimed
        node = next((n for n in made if n in chosen), None)
        site = item.site
        site.lowered, site.lowered_why = (default, "") if node is None else chosen[node]
        site.measured_us = times.get(node, {}) if node is not None else {}


def _ours(node: Node) -> bool:
    """Whether a node is an op to give a kernel. What is folded is computed once, by its reference."""
    ours = node.op == "call_function" and getattr(node.target, "namespace", "") == "sits"
    return ours and "sits_fold" not in node.meta


def _kernels_here(
    nodes: Sequence[Node], captured: Captured, applied: Sequence[Applied], lowering: Lowering
) -> tuple[dict[Node, Chosen], dict[Node, Times]]:
    """The kernels of this machine that pay, and what was measured."""
    found, chosen = candidates(nodes)
    inputs = dict(zip(captured.placeholders, captured.inputs, strict=True))
    verdicts = worth(found, inputs) if lowering.profitability == "measure" else {}
    sites = {
        n: item.site for item in applied for n in (item.edit.made if item.edit else item.claimed)
    }
    for one in found:
        times, why = verdicts.get(one.node, ({}, ""))
        if lowering.profitability == "model" and (lost := _loses(sites.get(one.node))):
            chosen[one.node] = "inductor", lost
            continue
        other = next((name for name in times if name != "sits"), "")
        told = f"measured {times['sits']:g} us, {other} {times[other]:g} us" if times else why
        if times and times["sits"] > times[other]:
            chosen[one.node] = "inductor", f"the kernel is slower here: {told}"
        else:
            chosen[one.node] = one.how, f"{one.why} ({told})" if told else one.why
            one.take()
    return chosen, {node: times for node, (times, _) in verdicts.items() if times}


def _loses(site: Site | None) -> str:
    """Why a kernel is not used by the cost model; empty where it is, or where a fact is unknown."""
    if site is None or site.predicted_us is None or site.unfused_us is None:
        return ""
    if site.predicted_us <= site.unfused_us:
        return ""
    return f"the cost model predicts {site.predicted_us:.3g} us for it, {site.unfused_us:.3g} us without"


def relax_views(graph: torch.fx.Graph) -> None:
    """A rewrite may change strides that a later `view` relied on; a `reshape` is right for any layout."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (
            aten.view.default,
            aten._unsafe_view.default,
        ):
            node.target = aten.reshape.default


@dataclass
class Finished:
    """A graph ready to compile: which of Dynamo's arguments it takes, then which folded values, and all values;
    which inputs are written behind it."""

    gm: GraphModule
    keep: list[int]
    hoisted: list[Hoisted]
    values: list[Any]
    attached: list[Any]
    behind: Behind
    repeated: list[list[str]] = field(
        default_factory=list
    )  # module paths of layers that share their code
    watch: Watch = field(default_factory=Watch)

    def product(self, compiled: Compiled, total: int) -> Product:
        """What was compiled of it, for Dynamo's `total` arguments."""
        constants = [*self.gm.parameters(), *self.gm.buffers()]
        return Product(
            compiled, self.keep, total, self.hoisted, self.attached, constants, self.behind,
            watch=self.watch,
        )  # fmt: skip


def finish(captured: Captured, lowering: Lowering) -> Finished:
    """Close the graph: write mutated inputs back, take folded values out, drop inputs nobody reads. Attributes of
    Dynamo's graph module (constants) become attributes of the new one."""
    relax_views(captured.gm.graph)
    later = written_behind(captured)
    restore(captured, later)
    write_in_place(captured.gm)
    hoisted = [] if lowering.grad else hoist(captured)
    offset = captured.attached
    keep: list[int] = []
    values: list[Any] = []
    for i, node in enumerate(captured.placeholders):
        if not node.users and node.op == "placeholder":
            captured.gm.graph.erase_node(node)
        elif i < offset:
            _bind_constant(captured.gm, node, captured.inputs[i])
        else:
            keep.append(i - offset)
            values.append(captured.inputs[i])
    repeated = outline(captured.gm) if lowering.repeat and lowering.compiles else []
    captured.gm.graph.lint()
    captured.gm.recompile()
    behind = Behind([captured.placeholders.index(p) for p in later])
    attached = captured.inputs[:offset]
    finished = Finished(captured.gm, keep, hoisted, values, attached, behind, repeated)
    values.extend(fold(finished.watch, hoisted, attached, captured.inputs[offset:]))
    return finished


def _bind_constant(gm: GraphModule, node: Node, value: Any) -> None:
    name = f"_sits_constant_{node.name}"
    if isinstance(value, torch.nn.Parameter):
        gm.register_parameter(name, value)
    else:
        gm.register_buffer(name, value, persistent=False)
    with gm.graph.inserting_before(node):
        attr = gm.graph.get_attr(name)
        attr.meta.update(node.meta)
    node.replace_all_uses_with(attr)
    gm.graph.erase_node(node)


def compile_graph(gm: GraphModule, values: list[Any], lowering: Lowering) -> Compiled:
    """The finished graph as a callable over `values`-like arguments."""
    if not lowering.compiles:
        return gm.forward
    from torch._inductor.compile_fx import compile_fx

    patches = {**inductor_patches(gm), **lowering.inductor}
    compiled: Any = compile_fx(gm, values, config_patches=patches or None)
    return compiled  # type: ignore[no-any-return]


def compile_whole(
    gm: GraphModule, values: list[Any], lowering: Lowering, op_by_op: Callable[[], Compiled]
) -> tuple[Compiled, OneFunction | None]:
    """The finished graph as one function where the recipe wants that and it can be, else as `op_by_op` compiles it; what
    came of it, where it was asked for."""
    if not lowering.regions or lowering.grad or lowering.how != "auto" or not _on_cpu(gm):
        return op_by_op(), None
    return chosen(gm, values, lowering.profitability, op_by_op)


def _on_cpu(gm: GraphModule) -> bool:
    found = (tensor(n) for n in gm.graph.find_nodes(op="placeholder"))
    return all(t is None or t.device.type == "cpu" for t in found)
