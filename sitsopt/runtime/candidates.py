"""The kernels that the nodes of one graph may be given, before it is decided whether each pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from ..graph.facts import tensor
from .choose import kernel_for

Chosen = tuple[str, str]  # by whom a node is lowered, and why


@dataclass
class Candidate:
    """A kernel for a node: the overload to call instead, what it is called with besides, and a note."""

    node: Node
    how: str
    overload: Any
    why: str
    more: dict[str, Any] = field(default_factory=dict)

    def take(self) -> None:
        """Point the node at the kernel."""
        self.node.target = self.overload
        self.node.kwargs = {**self.node.kwargs, **self.more}


def candidates(nodes: Sequence[Node]) -> tuple[list[Candidate], dict[Node, Chosen]]:
    """A candidate for each node that has a kernel where its tensors are; the rest stays with Inductor, and why."""
    on_gpu = [node for node in nodes if device_of(node) == "cuda"]
    found, refused = _on_gpu(on_gpu) if on_gpu else ([], {})
    for node in nodes:
        if node in on_gpu:
            continue
        overload, why = kernel_for(node)
        if overload is None:
            refused[node] = ("inductor", why)
        else:
            found.append(Candidate(node, "cpp", overload, why))
    return found, refused


def device_of(node: Node) -> str:
    """Where a node's first tensor is."""
    return next((t.device.type for n in node.all_input_nodes if (t := tensor(n)) is not None), "cpu")  # fmt: skip


def _on_gpu(nodes: Sequence[Node]) -> tuple[list[Candidate], dict[Node, Chosen]]:
    from .machine import detect_target
    from .triton import device
    from .triton.choose import compiled, op_of

    found, refused = [], dict[Node, Chosen]()
    for node, (texts, why) in compiled(nodes, detect_target("cuda")).items():
        if texts:
            overload = device.on_device(op_of(node))
            found.append(Candidate(node, "triton", overload, why, {"texts": texts}))
        else:
            refused[node] = ("inductor", why)
    return found, refused
