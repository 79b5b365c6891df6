"""Which generated texts a `sits::` node would run, read off its fake tensors; nothing is launched."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch._guards import detect_fake_mode
from torch.fx import Node
from torch.fx.node import map_arg

from ...graph.facts import val
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
