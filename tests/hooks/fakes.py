"""A machine that is not there: a file tree with /proc and /sys, an NVML that answers from a description."""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from sitsopt.runtime.hooks import Host

# The calls that the facts are made of; a test makes each of them fail in turn.
CALLS = (
    "nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemotePciInfo", "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetP2PStatus", "nvmlShutdown",
)  # fmt: skip


@dataclass
class Card:
    """One GPU. `links` are what each lane ends at: the number of a GPU, "switch", or None for one that is down."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    links: list[int | str | None] = field(default_factory=list)
    generation: int = 4
    capability: tuple[int, int] = (9, 0)
    mig: bool | None = False
    slices: tuple[str, ...] = ()


def cards(
    count: int,
    lanes: Mapping[tuple[int, int], int] | None = None,
    switch: int = 0,
    **more: Any,
) -> list[Card]:
    """`count` GPUs; `lanes` joins pairs, `switch` is the number of lanes that each has into an NVSwitch."""
    made = [
        Card(f"GPU-{chr(97 + i) * 8}-0000-0000-0000-00000000000{i}", **more) for i in range(count)
    ]
    for (a, b), width in (lanes or {}).items():
        made[a].links += [b] * width
        made[b].links += [a] * width
    for card in made:
        card.links += ["switch"] * switch
    return made


class FakeNvml(types.SimpleNamespace):
    """NVML's functions over `cards`. `fail` maps a call to the error that it raises; `denied` are pairs that the
    driver keeps apart although lanes are up."""

    def __init__(
        self,
        cards: Iterable[Card],
        fail: Mapping[str, Exception] | None = None,
        denied: Iterable[tuple[int, int]] = (),
    ) -> None:
        names = [n for n in dir(pynvml) if n.startswith(("NVML_", "NVMLError"))]
        super().__init__(**{name: getattr(pynvml, name) for name in names})
        self.cards, self.fail, self.denied = (
            list(cards),
            dict(fail or {}),
            {frozenset(p) for p in denied},
        )
        for name in CALLS:
            setattr(self, name, self._failing(name, getattr(self, f"_{name}")))

    def _failing(self, name: str, call: Any) -> Any:
        def guarded(*args: Any) -> Any:
            if name in self.fail:
                raise self.fail[name]
            return call(*args)

        return guarded

    def bus(self, index: int) -> str:
        return f"00000000:{index + 1:02X}:00.0"

    def _nvmlInit(self) -> None: ...

    def _nvmlShutdown(self) -> None: ...

    def _nvmlSystemGetDriverVersion(self) -> str:
        return "570.00"

    def _nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def _nvmlDeviceGetUUID(self, handle: Any) -> str:
        if isinstance(handle, tuple):
            return self.cards[handle[0]].slices[handle[1]]
        return self.cards[handle].uuid

    def _nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.cards[handle].name.encode()  # older bindings answer in bytes

    def _nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(busId=self.bus(handle))

    def _nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(total=80 << 30)

    def _nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.cards[handle].capability

    def _nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if self.cards[handle].mig is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(self.cards[handle].mig or 0), 0

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> tuple[int, int]:
        if index >= len(self.cards[handle].slices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle, index

    def _link(self, handle: int, link: int) -> int | str | None:
        links = self.cards[handle].links
        if not links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= len(links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return links[link]

    def _nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return int(self._link(handle, link) is not None)

    def _nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        peer = self._link(handle, link)
        return types.SimpleNamespace(
            busId="00000000:F0:00.0" if peer == "switch" else self.bus(int(peer or 0))
        )

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self._link(handle, link) == "switch" else 0

    def _nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return self.cards[handle].generation

    def _nvmlDeviceGetP2PStatus(self, a: int, b: int, what: int) -> int:
        assert what == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        one, two = self.cards[a], self.cards[b]
        met = b in one.links or a in two.links or ("switch" in one.links and "switch" in two.links)
        apart = frozenset((a, b)) in self.denied or one.mig or two.mig
        return (
            pynvml.NVML_P2P_STATUS_OK if met and not apart else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        )


def host(
    root: Path,
    cards: Iterable[Card] | None = (),
    *,
    nodes: Mapping[int, str] | None = None,
    gpu_nodes: Mapping[int, int] | None = None,
    allowed: str = "0-7",
    memory: str = "0",
    siblings: int = 1,
    env: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    fail: Mapping[str, Exception] | None = None,
    denied: Iterable[tuple[int, int]] = (),
) -> Host:
    """A host below `root`. `nodes` maps NUMA nodes to their CPUs, `gpu_nodes` GPUs to nodes (-1: not told);
    `cards` None: no NVML."""
    nodes = {0: "0-7"} if nodes is None else nodes
    status = f"Name:\tpython\nCpus_allowed_list:\t{allowed}\nMems_allowed_list:\t{memory}\n"
    tree = {
        "/proc/self/status": status,
        "/proc/meminfo": "MemTotal:  65536000 kB\nMemAvailable:  60000000 kB\n",
        "/sys/devices/system/node/online": ",".join(map(str, nodes)),
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "/proc/sys/kernel/numa_balancing": "0",
        **{f"/sys/devices/system/node/node{n}/cpulist": cpus for n, cpus in nodes.items()},
    }
    for cpu in range(16):
        first = cpu - cpu % siblings
        tree[f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = (
            f"{first}-{first + siblings - 1}" if siblings > 1 else str(cpu)
        )
    for index, node in (gpu_nodes or {}).items():
        tree[f"/sys/bus/pci/devices/0000:{index + 1:02x}:00.0/numa_node"] = str(node)
    for name, text in {**tree, **(files or {})}.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text + "\n":
            path.write_text(text + "\n")
    nvml = None if cards is None else FakeNvml(cards, fail, denied)
    return Host(root, dict(env or {}), nvml)


def same_json(one: Any, two: Any) -> bool:
    """Whether two plans are the same text, which also says that they are plain data."""
    return json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
