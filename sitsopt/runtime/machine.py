"""The machine that runs: what the operating system and torch say of it, and which target it is.

Every question is asked alone, and one that has no answer leaves None: a machine that tells less is
still a machine. Nothing here raises.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sitsopt.spec.target import Level, LevelName, Memory, Target, all_targets, load_target

from .bandwidth import read_bandwidth_gbs

__all__ = ["Gpu", "Machine", "detect_target", "facts", "read_bandwidth_gbs", "target_of"]

log = logging.getLogger(__name__)
T = TypeVar("T")

# Of the flags of /proc/cpuinfo those that decide which code can run.
FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16",
)  # fmt: skip

# Where a driver shows itself: NVIDIA's, AMD's, and the one of Windows' Linux.
GPU_FILES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees. `device` is cuda or hip, `arch` sm_NN or gfxNNN; memory in GB (10^9)."""

    index: int
    device: str
    name: str | None = None
    arch: str | None = None
    memory_gb: float | None = None
    units: int | None = None


@dataclass(frozen=True)
class Machine:
    """Facts of this machine; None is "not known". Cores are those this process may use; caches are in
    KiB, `l3_kb` the sum over all L3 caches; memory in GB (10^9 bytes)."""

    system: str | None = None
    isa: str | None = None
    cpu: str | None = None
    flags: tuple[str, ...] | None = None
    cores: int | None = None
    l1d_kb: int | None = None
    l2_kb: int | None = None
    l3_kb: int | None = None
    memory_gb: float | None = None
    gpus: tuple[Gpu, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def facts(root: Path = Path("/")) -> Machine:
    """Everything that can be found out about this machine. `root` holds `proc` and `sys`."""
    text = _ask(lambda: (root / "proc/cpuinfo").read_text(errors="replace")) or ""
    caches = _ask(lambda: _caches(root / "sys/devices/system/cpu")) or {}
    return Machine(
        system=_ask(platform.system) or None,
        isa=_ask(platform.machine) or None,
        cpu=_field(text, "model name", "Model", "Hardware"),
        flags=_flags(text),
        cores=_ask(_cores),
        l1d_kb=caches.get("l1d"),
        l2_kb=caches.get("l2"),
        l3_kb=caches.get("l3"),
        memory_gb=_ask(_memory_gb),
        gpus=_ask(lambda: tuple(_gpus())) or (),
    )


def detect_target(device: str = "auto", measure: bool = False) -> Target:
    """The target of this machine with this machine's own facts filled in: cores and caches of a CPU,
    and its read bandwidth when it was measured before, or now with `measure`.

    `device` is `cpu`, `cuda` (torch's name for AMD GPUs as well) or `auto`: a GPU if there is one.
    """
    machine = facts()
    target = target_of(machine, device)
    if target.emitter != "cpp":
        return target
    return _with_facts(target, machine, read_bandwidth_gbs(measure=measure))


def target_of(machine: Machine, device: str = "auto") -> Target:
    """The shipped target that fits a machine best; `cpu` when none does."""
    gpu = machine.gpus[0] if machine.gpus and device != "cpu" else None
    fits: dict[int, Target] = {}
    for target in all_targets():
        if target.detect is None:
            continue
        if gpu is None:
            score = target.detect.score("cpu", name=machine.cpu or "", flags=machine.flags or ())
        else:
            score = target.detect.score(gpu.device, name=gpu.name or "", arch=gpu.arch or "")
        if score is not None:
            fits.setdefault(score, target)
    return fits[max(fits)] if fits else load_target("cpu")


def _with_facts(target: Target, machine: Machine, bandwidth: float | None) -> Target:
    levels: dict[LevelName, Level | None] = {}
    if machine.l1d_kb:
        levels["l1"] = Level(size_kb=machine.l1d_kb, per="unit")
    if machine.l2_kb:
        levels["l2"] = Level(size_kb=machine.l2_kb, per="unit")
    if machine.l3_kb:
        levels["l3"] = Level(size_kb=machine.l3_kb, per="device")
    memory = Memory(bandwidth_gbs=bandwidth, size_gb=machine.memory_gb, levels=levels or None)
    return target.with_facts(
        memory=memory, compute=target.compute.model_copy(update={"units": machine.cores})
    )


def _ask(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except Exception as error:  # whatever a driver or a kernel file may do: the fact is unknown
        log.info("a fact of this machine is unknown: %s", error)
        return None


def _field(text: str, *names: str) -> str | None:
    for name in names:
        if found := re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE):
            return found[1].strip()
    return None


def _flags(text: str) -> tuple[str, ...] | None:
    line = _field(text, "flags", "Features")
    if line is None:
        return None
    present = set(line.split())
    return tuple(flag for flag in FLAGS if flag in present)


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_gb() -> float:
    import psutil

    return round(psutil.virtual_memory().total / 1e9, 1)


def _caches(cpus: Path) -> dict[str, int]:
    """KiB of the first core's L1d and L2, and of all L3 caches together."""
    found: dict[str, int] = {}
    shared: set[str] = set()
    for folder in sorted(cpus.glob("cpu[0-9]*/cache/index*")):
        level, kind = _read(folder / "level"), _read(folder / "type")
        size = re.fullmatch(r"(\d+)([KM]?)", _read(folder / "size"))
        if size is None:
            continue
        kb = int(size[1]) * {"": 1, "K": 1, "M": 1024}[size[2]]
        if level == "3":
            members = _read(folder / "shared_cpu_list") or str(folder)
            if members not in shared:
                shared.add(members)
                found["l3"] = found.get("l3", 0) + kb
        elif kind in ("Data", "Unified") and level in ("1", "2"):
            found.setdefault("l1d" if level == "1" else "l2", kb)
    return found


def _read(path: Path) -> str:
    return _ask(lambda: path.read_text().strip()) or ""


def _gpus() -> Iterator[Gpu]:
    if "torch" not in sys.modules and not any(map(os.path.exists, GPU_FILES)):
        return  # spares the second that importing torch takes
    import torch

    if not torch.cuda.is_available():
        return
    device = "hip" if torch.version.hip else "cuda"
    for index in range(torch.cuda.device_count()):
        yield _ask(partial(_gpu, torch, index, device)) or Gpu(index, device)


def _gpu(torch: Any, index: int, device: str) -> Gpu:
    known = torch.cuda.get_device_properties(index)
    gcn = str(getattr(known, "gcnArchName", "")).split(":")[0]
    arch = gcn if device == "hip" else f"sm_{known.major}{known.minor}"
    return Gpu(
        index, device, known.name, arch or None, round(known.total_memory / 1e9, 1),
        known.multi_processor_count,
    )  # fmt: skip
