"""The generated kernels that a model's own graphs need on a GPU target, with what each moves there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from ..emit.triton.cost import Cost
from ..emit.triton.source import Source
from ..graph.facts import DTYPE_NAMES
from ..options import Options
from ..rewrite.predict import flops
from ..runtime.triton.choose import names, planned
from ..runtime.triton.runner import Launch, NoText, Recorder, Runner
from ..spec.target import Target
from .explain import explain

SCRATCH = ("part_ptr", "top_ptr", "total_ptr", "lock_ptr", "lse_ptr", "mass_ptr")
PER_ELEMENT = 10.0  # operations, about, of a norm or a pointwise kernel


@dataclass(frozen=True)
class Needed:
    """A kernel at the shapes of a site; `sites` have it, in one call of each step."""

    source: Source
    cost: Cost
    sites: int = 1


def needed(
    model: nn.Module,
    options: Options,
    target: Target,
    inputs: Any = None,
    say: Callable[[str], object] = lambda text: None,
) -> list[Needed]:
    """Every kernel that the decode step and the prefill (or one forward) need. Traces, compiles nothing."""
    found: dict[tuple[Source, str], Needed] = {}
    plan = Runner(Recorder(), units=target.compute.units or 1)

    def choose(node: Node) -> tuple[str, str]:
        try:
            launches = planned(node, plan)
        except NoText as reason:
            return "inductor", str(reason)
        for launch in launches:
            one = Needed(launch.source, cost(launch, node))
            key = (launch.source, one.cost.problem)
            before = found.get(key)
            found[key] = replace(before, sites=before.sites + 1) if before else one
        return "triton", names(launches)

    explain(model, options, inputs=inputs, say=say, kernel=choose)
    return list(found.values())


def cost(launch: Launch, node: Node) -> Cost:
    """What one launch moves and computes. The least is every operand once, without room for partial sums."""
    pairs = zip(launch.source.params, launch.args, strict=True)
    tensors = [(p.name, t) for p, t in pairs if isinstance(t, torch.Tensor)]
    moved = sum(_bytes(t) for _, t in tensors)
    least = sum(_bytes(t) for name, t in tensors if name not in SCRATCH)
    programs = 1
    for size in launch.grid:
        programs *= int(size)
    first = tensors[0][1]
    told = ", ".join(f"{name.removesuffix('_ptr')} {_shape(t)}" for name, t in tensors[:3])
    unit = DTYPE_NAMES.get(first.dtype, "f32")
    return Cost(moved, least, _flops(launch, node, dict(tensors)), programs, told, unit)


def _flops(launch: Launch, node: Node, tensors: dict[str, torch.Tensor]) -> float:
    if launch.source.family == "matmul":
        return 2.0 * tensors["x_ptr"].shape[0] * tensors["w_ptr"].numel()
    if launch.source.family == "attention" and "q_ptr" in tensors:
        return float(flops(node))
    return PER_ELEMENT * max(t.numel() for t in tensors.values())


def _bytes(t: torch.Tensor) -> float:
    """Distinct bytes: a dim that is only spread counts once."""
    count = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return float(count * t.element_size())


def _shape(t: torch.Tensor) -> str:
    return "x".join(map(str, t.shape)) or "1"
