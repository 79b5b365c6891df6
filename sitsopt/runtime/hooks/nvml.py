"""Facts of the GPUs, from NVML and from the PCI bus in /sys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .facts import Facts
from .host import Absent, Host

# GB/s one way of one link, by the generation that NVML names. NVLink 5 has two lanes of 50 GB/s a link.
# Sources: NVIDIA whitepapers of P100, V100, A100, H100 and the Blackwell technical brief.
LINK_GBS = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
SWITCH, PEER = "switch", "gpu"


def ask_gpus(facts: Facts, host: Host) -> None:
    """Ask for every GPU, the visible ones and those that are not. Never raises."""
    nvml = host.nvml

    def start() -> str:
        if nvml is None:
            raise Absent(host.nvml_problem)
        nvml.nvmlInit()
        return "ready"

    if facts.ask("nvml", "NVML", start) is None:
        return
    try:
        facts.ask("nvml.driver", "NVML", lambda: _text(nvml.nvmlSystemGetDriverVersion()))
        count = facts.ask("gpu.count", "NVML", lambda: int(nvml.nvmlDeviceGetCount())) or 0
        handles = [_gpu(facts, host, index) for index in range(count)]
        for a in range(count):
            for b in range(a + 1, count):
                _pair(facts, nvml, handles, a, b)
    finally:
        facts.ask("nvml.closed", "NVML", lambda: nvml.nvmlShutdown() or True)
        del facts.all["nvml.closed"]


def _gpu(facts: Facts, host: Host, index: int) -> Any:
    nvml, name = host.nvml, f"gpu{index}"
    handles: list[Any] = []

    def present() -> bool:
        handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        return True

    if not facts.ask(f"{name}.present", "NVML", present):
        return None
    handle = handles[0]

    def ask(what: str, question: Callable[[], Any], source: str = "NVML") -> Any:
        return facts.ask(f"{name}.{what}", source, question)

    ask("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
    ask("name", lambda: _text(nvml.nvmlDeviceGetName(handle)))
    bus = ask("bus", lambda: bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)))
    ask("memory_mb", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20)
    ask("capability", lambda: list(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    if ask("mig", lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])):
        ask("slices", lambda: _slices(nvml, handle))
    ask("links", lambda: _links(nvml, handle))
    source = f"/sys/bus/pci/devices/{bus}/numa_node"
    ask("node", lambda: _node(host, source, bus), source)
    return handle


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def bus_id(text: str) -> str:
    """A PCI address as /sys spells it: `00000000:3B:00.0` is `0000:3b:00.0`."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _slices(nvml: Any, handle: Any) -> list[str]:
    found = []
    for index in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))):
        try:
            slice_ = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:
            continue  # an empty place
        found.append(_text(nvml.nvmlDeviceGetUUID(slice_)))
    return found


def _links(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """The links of a GPU: `active`, `peer` (its PCI address), `kind` (gpu or switch) and `gbs` one way; what
    NVML does not say is None. Raises what NVML raises when it knows nothing of any link."""
    links: list[dict[str, Any]] = []
    for link in range(int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))):
        try:
            active: bool | None = bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError as error:
            if _says(nvml, error, "InvalidArgument", "NotSupported"):
                if not links:
                    raise
                break  # past the last link of this GPU
            active = None
        entry: dict[str, Any] = {
            "link": link,
            "active": active,
            "peer": None,
            "kind": None,
            "gbs": None,
        }
        if active:
            entry |= _end(nvml, handle, link)
        links.append(entry)
    if links and all(entry["active"] is None for entry in links):
        raise Absent("NVML tells the state of no link")
    return links


def _says(nvml: Any, error: Exception, *names: str) -> bool:
    kinds = tuple(kind for name in names if (kind := getattr(nvml, f"NVMLError_{name}", None)))
    return isinstance(error, kinds)


def _end(nvml: Any, handle: Any, link: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    questions: dict[str, Callable[[], Any]] = {
        "peer": lambda: bus_id(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)),
        "kind": lambda: _kind(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)),
        "gbs": lambda: LINK_GBS.get(int(nvml.nvmlDeviceGetNvLinkVersion(handle, link))),
    }
    for name, question in questions.items():
        try:
            found[name] = question()
        except Exception:  # an old driver, or one that may not say: this one answer is missing
            found[name] = None
    return found


def _kind(nvml: Any, value: int) -> str | None:
    known = {
        getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_GPU", 0): PEER,
        getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2): SWITCH,
    }
    return known.get(value)


def _node(host: Host, source: str, bus: str | None) -> int:
    if bus is None:
        raise Absent("the PCI address is unknown")
    node = int(host.read(source))
    if node < 0:
        raise Absent("the firmware names no node (-1)")
    return node


def _pair(facts: Facts, nvml: Any, handles: list[Any], a: int, b: int) -> None:
    """Whether the driver lets two GPUs reach each other over NVLink: asked for the pair, since lanes that are up
    on both say nothing about where they lead."""

    def linked() -> bool:
        if handles[a] is None or handles[b] is None:
            raise Absent("a GPU does not answer")
        status = nvml.nvmlDeviceGetP2PStatus(
            handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_NVLINK
        )
        if status == nvml.NVML_P2P_STATUS_UNKNOWN:
            raise Absent("NVML says unknown")
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    facts.ask(f"pair.{a}.{b}.nvlink", "NVML", linked)
