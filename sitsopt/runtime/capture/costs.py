"""What the planner of regions asks of a target: the cost model, limits of memory, whether addresses are unified."""

from __future__ import annotations

from torch.fx import Node

from ...graph.facts import nbytes, val
from ...graph.regions.facts import INTO, op_name
from ...graph.regions.forks import Costs
from ...rewrite.cost import Work, predict_us
from ...rewrite.predict import work
from ...spec.region import RegionFile
from ...spec.target import Target


def costs_of(target: Target, rule: RegionFile) -> Costs:
    """The costs of one target under the limits of a rule."""
    known: dict[tuple[object, ...], float | None] = {}

    def us(node: Node) -> float | None:
        key = node.target, id(val(node)), *(id(val(n)) for n in node.all_input_nodes)
        if key not in known:
            known[key] = predict_us(_alone(node), target)
        return known[key]

    return Costs(us, target.links.launch_us, target.links.host_launch_us, unified(target), limit(target, rule))  # fmt: skip


def _alone(node: Node) -> Work:
    """The work of a node without its start. A scatter into a cache moves what it writes, not the cache."""
    one = work(node)
    if op_name(node) in INTO:
        moved = sum((nbytes(val(n)) for n in node.all_input_nodes[1:]), 0)
        return Work(2 * moved, 0, 0, one.dtype)
    return Work(one.bytes, one.flops, 0, one.dtype)


def unified(target: Target) -> tuple[bool, str]:
    """Whether a pointer means the same memory on every stream of a device, and why."""
    if target.emitter != "triton":
        return False, f"{target.name} has no streams"
    if target.arch.startswith("sm_"):
        return True, "one device; CUDA has one address space for all streams since compute capability 2.0"  # fmt: skip
    return True, "one device; ROCm has one address space for all streams"


def limit(target: Target, rule: RegionFile) -> int | None:
    """Bytes that static buffers may take; None where neither the rule nor the target says."""
    limits = []
    if rule.memory.limit_mb is not None:
        limits.append(int(rule.memory.limit_mb * 2**20))
    if target.memory.size_gb is not None:
        limits.append(int(rule.memory.share * target.memory.size_gb * 1e9))
    return min(limits, default=None)
