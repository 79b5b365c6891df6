"""The GPUs of a machine, and which of them this process sees in what order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .facts import Facts


class MaskError(ValueError):
    """CUDA_VISIBLE_DEVICES names something that is not there; the text says what is."""


@dataclass(frozen=True)
class Device:
    """A GPU, or with `slice` a part of one. `index` is NVML's number, by PCI address. None is unknown."""

    index: int
    uuid: str | None = None
    name: str | None = None
    bus: str | None = None
    node: int | None = None
    mig: bool | None = None
    slice: str | None = None
    links: tuple[dict[str, Any], ...] | None = None

    @property
    def label(self) -> str:
        """Its UUID, which no mask or order changes; its number where there is none."""
        return self.slice or self.uuid or f"gpu{self.index}"


@dataclass(frozen=True)
class Visible:
    """The devices in CUDA's order. `problem` says what is not known of them, such as the order."""

    devices: tuple[Device, ...]
    problem: str = ""


def all_devices(facts: Facts) -> list[Device]:
    """Every GPU that NVML knows, by PCI address."""
    found = []
    for index in range(facts["gpu.count"] or 0):
        name = f"gpu{index}"
        links = facts[f"{name}.links"]
        known = {k: facts[f"{name}.{k}"] for k in ("uuid", "name", "bus", "node", "mig")}
        found.append(Device(index, links=None if links is None else tuple(links), **known))
    return found


def visible(facts: Facts) -> Visible:
    """The devices that CUDA would show this process. Raises MaskError."""
    devices = all_devices(facts)
    slices = {d.index: tuple(facts[f"gpu{d.index}.slices"] or ()) for d in devices}
    ordered, problem = _cuda_order(devices, facts["env.CUDA_DEVICE_ORDER"] or "")
    mask = facts["env.CUDA_VISIBLE_DEVICES"]
    if mask is None:
        return Visible(tuple(_first_slice(d, slices) for d in ordered), problem)
    chosen = []
    for entry in mask.split(",") if mask.strip() else ():
        device = find(entry.strip(), ordered, slices)
        if device is None:
            break  # as CUDA does: what follows a number out of range is not seen either
        chosen.append(device)
    by_number = any(entry.strip().lstrip("-").isdigit() for entry in mask.split(","))
    return Visible(tuple(chosen), problem if by_number else "")


def _cuda_order(devices: list[Device], order: str) -> tuple[list[Device], str]:
    names = {d.name for d in devices}
    if order.upper() == "PCI_BUS_ID" or (len(names) == 1 and None not in names) or len(devices) < 2:
        return devices, ""
    return devices, (
        "CUDA numbers unlike GPUs by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID: numbers here are those of the"
        " PCI bus"
    )


def _first_slice(device: Device, slices: dict[int, tuple[str, ...]]) -> Device:
    """Of a GPU that is cut up CUDA shows the first part."""
    return (
        _slice(device, slices[device.index][0]) if device.mig and slices[device.index] else device
    )


def _slice(device: Device, uuid: str) -> Device:
    return Device(**{**vars(device), "slice": uuid})


def find(entry: str, devices: list[Device], slices: dict[int, tuple[str, ...]]) -> Device | None:
    """The device that one entry of a mask means; None for a number that is out of range.

    An entry is a number, a UUID or its beginning, a MIG UUID, or the older `MIG-GPU-<uuid>/<gi>/<ci>`; letters
    may be large or small. Raises MaskError for a UUID that fits none or several.
    """
    if entry.lstrip("-").isdigit():
        number = int(entry)
        return _first_slice(devices[number], slices) if 0 <= number < len(devices) else None
    low = entry.lower()
    candidates = {d.uuid.lower(): d for d in devices if d.uuid}
    candidates |= {u.lower(): _slice(d, u) for d in devices for u in slices.get(d.index, ())}
    if low.startswith("mig-gpu-"):
        parent = _only(low.removeprefix("mig-").partition("/")[0], candidates, entry)
        return _slice(parent, entry)
    return _only(low, candidates, entry)


def _only(low: str, candidates: dict[str, Device], entry: str) -> Device:
    found = [device for uuid, device in candidates.items() if uuid.startswith(low)]
    if len(found) == 1:
        return found[0]
    what = "no device" if not found else f"{len(found)} devices"
    raise MaskError(
        f"CUDA_VISIBLE_DEVICES: `{entry}` fits {what}; there are " + ", ".join(candidates)
    )
