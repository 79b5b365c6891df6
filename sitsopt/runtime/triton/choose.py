"""Which generated texts a `sits::` node would run, read off its fake tensors; nothing is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch._guards import detect_fake_mode
from torch.fx import Node
from torch.fx.node import map_arg

from ...emit.triton.source import Source
from ...graph.facts import val
from ...spec.target import Target
from .fit import fit
from .runner import Launch, NoText, Recorder, Runner
from .sites import SITES, names

Chosen = tuple[str, str]
NO_TEXT = "no Triton text for this op"


def launches(node: Node, on: Runner | None = None) -> list[Launch]:
    """The launches of a node on a device. Raises NoText with the reason where there is no text for it."""
    name = op_of(node)
    body = SITES.get(name)
    if body is None:
        raise NoText(NO_TEXT)
    everything: Any = (node.args, dict(node.kwargs))
    fake: Any = val
    args, kwargs = map_arg(everything, fake)
    recorder = Recorder()
    planned = replace(on or Runner(recorder), run=recorder)
    mode = detect_fake_mode([n.meta.get("val") for n in node.all_input_nodes])
    with mode or nullcontext():
        body(planned, *args, **kwargs)
    return recorder.launches


MANY_ROWS = "more than 16 rows: a library's product is as fast"


def planned(node: Node, on: Runner | None = None) -> list[Launch]:
    """The launches of a node on a GPU, where it is to be lowered to them at all. Raises NoText."""
    found = launches(node, on)
    if op_of(node) in ("linears", "linear_act") and any("SPLITS" not in dict(x.source.constants) for x in found):  # fmt: skip
        raise NoText(MANY_ROWS)
    return found


def on_paper(target: Target) -> Callable[[Node], Chosen]:
    """Who lowers a node on a GPU target, as far as its texts tell; nothing is compiled."""
    plan = Runner(Recorder(), units=target.compute.units or 1)

    def choose(node: Node) -> Chosen:
        try:
            return "triton", names(planned(node, plan))
        except NoText as reason:
            return "inductor", str(reason)

    return choose


def compiled(nodes: Sequence[Node], target: Target) -> dict[Node, tuple[str, str]]:
    """For each node a digest of its kernels, compiled for a target at block sizes that fit, and their names; or
    nothing, and why there is no kernel."""
    from . import device

    asked: dict[Source, None] = {}

    def note(source: Source) -> Source:
        asked[source] = None
        return source

    plan = Runner(Recorder(), note, target.compute.units or 1)
    wanted, answers = dict[Node, list[Source]](), dict[Node, tuple[str, str]]()
    for node in nodes:
        asked = {}
        try:
            planned(node, plan)
            wanted[node] = list(asked)
        except NoText as reason:
            answers[node] = "", str(reason)
    sources = list(dict.fromkeys(source for found in wanted.values() for source in found))
    settled = dict(zip(sources, fit(sources, target), strict=True))
    for source, one in settled.items():
        device.settle(source, one.source)
    for node, found in wanted.items():
        wrong = [settled[source] for source in found if settled[source].wrong]
        if wrong:
            answers[node] = "", f"{wrong[0].source.name}: {wrong[0].wrong.splitlines()[-1]}"
        else:
            used = [settled[source].source for source in found]
            answers[node] = device.texts(used), ", ".join(source.name for source in used)
    return answers


def op_of(node: Node) -> str:
    """The name of a node's op, without its namespace."""
    return str(node.target._schema.name.split("::")[1])  # type: ignore[union-attr]


def interpreted(node: Node) -> Chosen:
    """Points a node at its texts in the interpreter; by whom it is lowered, and why."""
    from . import ops

    try:
        found = launches(node)
    except NoText as reason:
        return "eager", str(reason)
    devices = {tensor.device.type for launch in found for tensor in launch.tensors} - {"cpu"}
    if devices:
        where = ", ".join(sorted(devices))
        return "eager", f"the interpreter reads CPU memory, not tensors on {where}"
    node.target = ops.interpreted(op_of(node))
    return "interpret", f"triton text {names(found)}"
