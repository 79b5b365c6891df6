"""The hook `nvlink`: which GPUs reach which over NVLink, and how an all-reduce over them is best done."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

from .collective import SIZES, Decision, as_rows, decide, ways
from .devices import MaskError, Visible, visible
from .facts import Facts
from .links import Links, link_graph
from .plan import Action, Plan, Settings, Wanted
from .ring import best_ring, ring_width

# Compute capabilities for which NCCL itself turns the protocol LL128 on (src/graph/tuning.cc).
LL128 = ([7, 0], [8, 0], [9, 0])


class NvLink(Settings):
    """Plans from the link graph; sets NCCL's variables, before its first communicator, where the whole group of
    visible GPUs stays on NVLink."""

    name = "nvlink"

    def plan(self, facts: Facts, wanted: Wanted) -> Plan:
        plan = Plan(self.name)
        if facts["nvml"] is None:
            return plan.refuse("the link graph", f"NVML: {facts.all['nvml'].problem}")
        try:
            seen = visible(facts)
        except MaskError as error:
            return plan.refuse("the link graph", str(error))
        if len(seen.devices) < 2:
            found = f"{len(seen.devices)} of {facts['gpu.count']} GPUs visible"
            return plan.refuse("collectives", f"{found}: nothing to connect")
        links = link_graph(facts, seen.devices)
        self._describe(plan, links, seen)
        if not self._admitted(plan, links):
            return plan
        self._decide(plan, facts, links, wanted)
        return plan

    def _describe(self, plan: Plan, links: Links, seen: Visible) -> None:
        everyone = range(len(links.devices))
        ring = best_ring(links.graph)
        plan.data = {
            **links.json(),
            "reach": links.mask(),
            "full": links.full(everyone),
            "groups": links.groups(),
            "ring": ring,
            "ring_gbs": ring and _known_width(links, ring),
        }
        if seen.problem:
            plan.advice.append(seen.problem)
        plan.advice += links.notes

    def _admitted(self, plan: Plan, links: Links) -> bool:
        admitted = links.admits(range(len(links.devices)))
        if admitted is False:
            reason = "some pair would go over PCIe; NVLink joins " + " and ".join(
                "-".join(map(str, group)) for group in links.groups()
            )
            plan.refuse("an all-reduce over all visible GPUs on NVLink", reason)
        elif admitted is None:
            pairs = ", ".join(f"{a}-{b}" for a, b in sorted(links.unknown))
            plan.refuse(
                "an all-reduce over all visible GPUs on NVLink", f"not known to be linked: {pairs}"
            )
        return bool(admitted)

    def _decide(self, plan: Plan, facts: Facts, links: Links, wanted: Wanted) -> None:
        if any(links.graph.edges[edge]["gbs"] is None for edge in links.graph.edges):
            plan.refuse("the choice of an algorithm", "the speed of some links is unknown")
            return
        found = ways(links)
        capable = all(facts[f"gpu{d.index}.capability"] in LL128 for d in links.devices)
        table = decide(found, SIZES, capable)
        plan.data["ways"] = [vars(way) for way in found]
        plan.data["decisions"] = as_rows(table)
        sizes = wanted.message_bytes or SIZES
        chosen = decide(found, sizes, capable)
        own = sorted({(d.best, d.bytes) for d in chosen if d.best not in ("ring", "tree")})
        if own:
            plan.advice.append(
                "an all-reduce of its own would beat NCCL's at "
                + ", ".join(f"{size} bytes ({way})" for way, size in own[:4])
            )
        self._variables(plan, facts, links, chosen, capable)

    def _variables(
        self, plan: Plan, facts: Facts, links: Links, chosen: list[Decision], capable: bool
    ) -> None:
        values = {
            "NCCL_ALGO": ",".join(sorted({d.nccl for d in chosen})),
            "NCCL_PROTO": ",".join(sorted({d.nccl_protocol for d in chosen})),
            "NCCL_P2P_LEVEL": "NVL",
        }
        why = f"cheapest for {_range(chosen)} over {len(links.devices)} GPUs by the cost model"
        late = _initialised()
        for name, value in values.items():
            if facts[f"env.{name}"] is not None:
                plan.refuse(f"{name}={value}", f"the environment says {facts[f'env.{name}']}")
            elif late:
                plan.refuse(f"{name}={value}", late)
            else:
                reason = "peers meet over NVLink, never over PCIe" if value == "NVL" else why
                plan.actions.append(Action(f"env:{name}", value, reason, because=("gpu.count",)))
        if plan.data["ring"] and not links.ports:
            plan.data["nccl_graph"] = graph_file(links, plan.data["ring"])
            plan.refuse(
                "NCCL_GRAPH_FILE",
                "the ring is in the plan as NCCL's XML; NCCL checks no such file, so none is set",
            )


def _known_width(links: Links, ring: list[int]) -> float | None:
    edges = [links.graph.edges[edge] for edge in pairwise([*ring, ring[0]])]
    return ring_width(links.graph, ring) if all(edge["gbs"] for edge in edges) else None


def _range(chosen: list[Decision]) -> str:
    low, high = chosen[0].bytes, chosen[-1].bytes
    return f"{low} bytes" if low == high else f"{low} to {high} bytes"


def _initialised() -> str:
    """Why NCCL would not read its variables any more, or nothing."""
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        return "a process group is initialised already, and NCCL reads it before that"
    return ""


def graph_file(links: Links, ring: list[int]) -> str:
    """The ring as NCCL writes one out (NCCL_GRAPH_DUMP_FILE): one channel, pattern 4."""
    graphs = ElementTree.Element("graphs", version="1")
    speed = str(ring_width(links.graph, ring))
    graph = ElementTree.SubElement(
        graphs, "graph", id="0", pattern="4", crossnic="0", nchannels="1", speedintra=speed,
        speedinter=speed, latencyinter="0", typeintra="NVL", typeinter="PIX", samechannels="1",
    )  # fmt: skip
    channel = ElementTree.SubElement(graph, "channel")
    for place in ring:
        ElementTree.SubElement(channel, "gpu", dev=str(place))
    return ElementTree.tostring(graphs, encoding="unicode")


def predicted(plan: Plan, size: int) -> float | None:
    """Microseconds that the plan expects of NCCL for one message size; None when it made no table."""
    rows: list[dict[str, Any]] = plan.data.get("decisions", [])
    for below, above in pairwise(rows):
        if below["bytes"] <= size <= above["bytes"]:
            share = (size - below["bytes"]) / (above["bytes"] - below["bytes"])
            return float(below["nccl_us"] + share * (above["nccl_us"] - below["nccl_us"]))
    return None


def measure(group: Any, sizes: tuple[int, ...], rounds: int = 5) -> dict[int, float]:
    """Microseconds of an all-reduce of f32, the shortest of `rounds`, by message size in bytes. Every process of
    the group has to call it; the tensors lie where the group's backend wants them."""
    import time

    import torch

    device = "cuda" if group.name() == "nccl" else "cpu"
    found = {}
    for size in sizes:
        tensor = torch.zeros(max(1, size // 4), device=device)
        times = []
        for _ in range(rounds + 1):  # the first sets up connections
            start = time.perf_counter()
            group.allreduce([tensor]).wait()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        found[size] = round(min(times[1:]) * 1e6, 1)
    return found
