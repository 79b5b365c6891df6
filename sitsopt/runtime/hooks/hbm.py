"""The hook `hbm`: where memory lies. The GPU's NUMA node for CPU and memory, page balancing, the allocator's pools,
the part of the L2 that keeps what is read again, and which kernels read memory badly."""

from __future__ import annotations

import sys
from typing import Any

from .access import Access, advice_on
from .devices import MaskError, visible
from .facts import BALANCING, Facts
from .host import as_cpu_list
from .plan import Action, Plan, Settings, Wanted

# Balancing moves pages by faulting them; a scan so rare does nothing in the time of a request.
SCAN_MS = {"min": 60_000, "max": 600_000}
# CUDA C++ Programming Guide, L2 set-aside: at most three quarters of the L2, from compute capability 8.0 on, and
# none at all on a GPU that is cut into parts (MIG).
PERSISTING_SHARE = 0.75


class Hbm(Settings):
    """Binds to the node of the GPUs that are visible; asks for page balancing to be off; sets the pools of torch's
    allocator before CUDA starts."""

    name = "hbm"
    after = ("nvlink",)

    def plan(self, facts: Facts, wanted: Wanted) -> Plan:
        plan = Plan(self.name)
        _patterns(plan, wanted)
        _balancing(plan, facts)
        try:
            devices = visible(facts).devices
        except MaskError as error:
            return plan.refuse("binding to a GPU's node", str(error))
        if not devices:
            why = facts.all["nvml"].problem or "no GPU is visible"
            return plan.refuse("binding to a GPU's node, allocator pools, L2 windows", why)
        _bind(plan, facts, sorted({d.node for d in devices if d.node is not None}), len(devices))
        _pools(plan, facts)
        _persist(plan, facts, wanted, devices)
        return plan


def _patterns(plan: Plan, wanted: Wanted) -> None:
    accesses = [
        Access(name, tuple(w.shape), tuple(w.stride()), w.element_size())
        for name, w in wanted.weights.items()
        if w.dim() == 2
    ]
    channels = getattr(getattr(wanted.target, "memory", None), "channels", None)
    found = [each for access in accesses for each in advice_on(access, channels)]
    plan.data["patterns"] = {"looked_at": len(accesses), "found": found}
    plan.advice += found[:8]
    if len(found) > 8:
        plan.advice.append(f"and {len(found) - 8} more accesses like these (see the JSON)")


def _balancing(plan: Plan, facts: Facts) -> None:
    nodes, mode = facts["numa.nodes"], facts["numa.balancing"]
    if mode is None:
        plan.refuse("page balancing", f"unknown: {facts.all['numa.balancing'].problem}")
    elif nodes is not None and len(nodes) < 2:
        plan.refuse("page balancing", "one memory node: there is nothing to balance")
    elif mode == 0:
        plan.refuse("page balancing", "it is off already")
    else:
        because = ("numa.balancing", "numa.nodes")
        for bound, value in SCAN_MS.items():
            fact = facts.all[f"numa.scan_period_{bound}_ms"]
            if fact.value is not None and fact.value < value:
                plan.actions.append(
                    Action(
                        f"file:{fact.source}",
                        value,
                        "fewer page faults even where balancing stays on",
                        "system",
                        (f"numa.scan_period_{bound}_ms",),
                    )
                )
        plan.actions.append(
            Action(
                f"file:{BALANCING}",
                0,
                "balancing faults pages of staging buffers in and out",
                "system",
                because,
            )
        )


def _bind(plan: Plan, facts: Facts, nodes: list[int], gpus: int) -> None:
    if not nodes:
        plan.refuse("binding to a GPU's node", "the node of no visible GPU is known")
        return
    if len(nodes) > 1:
        plan.refuse(
            "binding to a GPU's node", f"{gpus} GPUs on the nodes {nodes}: bind one process to each"
        )
        return
    node = nodes[0]
    cpus, allowed = facts[f"numa.node{node}.cpus"], facts["cpu.allowed"]
    because = ("gpu.count", f"numa.node{node}.cpus", "cpu.allowed", "numa.allowed")
    plan.data["node"] = node
    if not cpus or allowed is None:
        plan.refuse("CPU binding", f"the CPUs of node {node}, or those allowed, are unknown")
    elif not set(cpus) & set(allowed):
        plan.refuse(
            "CPU binding",
            f"none of node {node}'s CPUs ({as_cpu_list(cpus)}) is allowed to this process",
        )
    elif set(allowed) <= set(cpus):
        plan.refuse("CPU binding", f"the process runs on node {node} alone already")
    else:
        near = sorted(set(cpus) & set(allowed))
        plan.actions.append(
            Action("affinity", near, f"the CPUs next to the GPU (node {node})", because=because)
        )
    memory = facts["numa.allowed"]
    if memory is None or node not in memory:
        plan.refuse(
            "memory binding", f"node {node} is not among the memory nodes allowed ({memory})"
        )
    elif len(memory) > 1:
        plan.actions.append(
            Action("memory-node", node, "staging buffers beside the GPU", because=because)
        )


def _pools(plan: Plan, facts: Facts) -> None:
    names = [
        name
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        if facts[f"env.{name}"] is not None
    ]
    value = "expandable_segments:True,roundup_power2_divisions:8"
    torch = sys.modules.get("torch")
    if names:
        plan.refuse("allocator pools", f"{names[0]} is {facts[f'env.{names[0]}']}")
    elif torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        plan.refuse("allocator pools", "CUDA is initialised: torch has read its settings")
    else:
        why = (
            "segments that grow leave fewer holes; sizes rounded to eighths find freed blocks again"
        )
        plan.actions.append(
            Action("env:PYTORCH_CUDA_ALLOC_CONF", value, why, because=("gpu.count",))
        )


def _persist(plan: Plan, facts: Facts, wanted: Wanted, devices: tuple[Any, ...]) -> None:
    what = "an L2 window for what is read again"
    l2 = _l2_bytes(wanted.target)
    capabilities = [facts[f"gpu{d.index}.capability"] for d in devices]
    if any(d.mig for d in devices):
        plan.refuse(what, "a GPU that is cut into parts (MIG) has none")
    elif any(d.mig is None for d in devices) and any((c or [0])[0] >= 8 for c in capabilities):
        plan.refuse(what, "whether the GPU is cut into parts (MIG) is unknown")
    elif None in capabilities or min(capabilities)[0] < 8:
        plan.refuse(what, f"it needs compute capability 8.0, this is {capabilities}")
    elif l2 is None:
        plan.refuse(what, "the size of the L2 is unknown")
    else:
        size = int(l2 * PERSISTING_SHARE)
        reason = "scales and norms are read at every token while weights stream past"
        plan.actions.append(Action("l2-persist", size, reason, because=("gpu.count",)))


def _l2_bytes(target: Any) -> int | None:
    levels = getattr(getattr(target, "memory", None), "levels", None) or {}
    level: Any = levels.get("l2")
    if level is None or level.per != "device" or not level.size_kb:
        return None
    return int(level.size_kb * 1024)
