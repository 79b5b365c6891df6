"""What is known of a machine: every fact with its source. What cannot be found out is None, never False.

Each question is asked alone: a driver that refuses one answer costs that one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from .host import Absent, Host, cpu_list

log = logging.getLogger("sitsopt")

SELF = "/proc/self/status"
THP = "/sys/kernel/mm/transparent_hugepage/enabled"
BALANCING = "/proc/sys/kernel/numa_balancing"
# The scan periods moved from sysctl to debugfs with Linux 5.13.
PERIODS = {
    bound: (
        f"/sys/kernel/debug/sched/numa_balancing/scan_period_{bound}_ms",
        f"/proc/sys/kernel/numa_balancing_scan_period_{bound}_ms",
    )
    for bound in ("min", "max")
}
VARIABLES = (
    "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "NCCL_ALGO", "NCCL_GRAPH_FILE",
    "NCCL_P2P_LEVEL", "NCCL_PROTO", "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "THP_MEM_ALLOC_ENABLE",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """`value` is plain data, None when unknown: `problem` then says why."""

    value: Any
    source: str
    problem: str = ""


class Facts:
    """Facts by dotted name, such as `cpu.allowed`; `facts[name]` is the value, None for one never asked."""

    def __init__(self) -> None:
        self.all: dict[str, Fact] = {}

    def __getitem__(self, name: str) -> Any:
        return self.all[name].value if name in self.all else None

    def ask(self, name: str, source: str, question: Callable[[], Any]) -> Any:
        """Note the answer to a question, or why there is none; the answer."""
        try:
            fact = Fact(question(), source)
        except Exception as error:  # whatever a driver may raise: this fact is unknown
            text = str(error) if isinstance(error, Absent) else f"{type(error).__name__}: {error}"
            log.info("%s is unknown: %s", name, text)
            fact = Fact(None, source, text)
        self.all[name] = fact
        return fact.value

    def below(self, prefix: str) -> Iterator[tuple[str, Fact]]:
        """The facts whose name starts so."""
        return ((name, fact) for name, fact in self.all.items() if name.startswith(prefix))

    def json(self) -> dict[str, dict[str, Any]]:
        """Plain data: name to value, source and, when unknown, problem."""
        return {name: asdict(fact) for name, fact in sorted(self.all.items())}


def gather(host: Host) -> Facts:
    """Everything that can be found out about a host. Never raises."""
    from .nvml import ask_gpus

    facts = Facts()
    _processor(facts, host)
    _memory(facts, host)
    _numa(facts, host)
    for name in VARIABLES:
        if name in host.environ:  # one that is not set is no fact
            facts.ask(f"env.{name}", "environment", partial(host.environ.__getitem__, name))
    ask_gpus(facts, host)
    return facts


def _processor(facts: Facts, host: Host) -> None:
    def allowed() -> list[int]:
        return cpu_list(host.field(SELF, "Cpus_allowed_list"))

    cpus = facts.ask("cpu.allowed", SELF, allowed)
    if cpus is None and host.live:
        cpus = facts.ask("cpu.allowed", "psutil", _psutil_affinity)
    online = "/sys/devices/system/cpu/online"
    facts.ask("cpu.online", online, lambda: cpu_list(host.read(online)))
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

    def cores() -> list[list[int]]:
        """CPUs that this process may use, those of one core together."""
        if cpus is None:
            raise Absent("the CPUs are unknown")
        groups = {tuple(cpu_list(host.read(topology.format(cpu)))) for cpu in cpus}
        return sorted(sorted(set(group) & set(cpus)) for group in groups)

    facts.ask("cpu.cores", topology.format("*"), cores)
    facts.ask("cpu.quota", "cgroup cpu.max, cpu.cfs_quota_us", lambda: _quota(host))


def _psutil_affinity() -> list[int]:
    import psutil

    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):
        return sorted(process.cpu_affinity() or [])
    return list(range(psutil.cpu_count() or 1))


def _quota(host: Host) -> float:
    """CPUs' worth of time that the control group grants. Raises Absent where it sets no limit."""
    try:
        quota, period = host.read("/sys/fs/cgroup/cpu.max").split()
    except Absent:
        folder = "/sys/fs/cgroup/cpu"
        quota, period = (
            host.read(f"{folder}/cpu.cfs_quota_us"),
            host.read(f"{folder}/cpu.cfs_period_us"),
        )
    if quota in ("max", "-1"):
        raise Absent("no limit")
    return round(int(quota) / int(period), 3)


def _memory(facts: Facts, host: Host) -> None:
    for name, key in (("total", "MemTotal"), ("available", "MemAvailable")):
        fact = f"memory.{name}_mb"
        found = facts.ask(
            fact,
            "/proc/meminfo",
            partial(_meminfo, host, key),
        )
        if found is None and host.live:
            facts.ask(fact, "psutil", partial(_psutil_memory, name))
    facts.ask("memory.group_limit_mb", "cgroup memory.max", lambda: _group_limit(host))
    facts.ask("memory.address_limit_mb", "/proc/self/limits", lambda: _address_limit(host))
    facts.ask("memory.overcommit", "/proc/sys/vm/overcommit_memory",
              lambda: int(host.read("/proc/sys/vm/overcommit_memory")))  # fmt: skip
    facts.ask("pages.transparent", THP, lambda: _chosen(host.read(THP)))
    huge = "/proc/sys/vm/nr_hugepages"
    facts.ask("pages.reserved_huge", huge, lambda: int(host.read(huge)))


def _meminfo(host: Host, key: str) -> int:
    return int(host.field("/proc/meminfo", key).split()[0]) // 1024


def _number(host: Host, file: str) -> int:
    return int(host.read(file))


def _list(host: Host, file: str) -> list[int]:
    return cpu_list(host.read(file))


def _psutil_memory(name: str) -> int:
    import psutil

    return int(getattr(psutil.virtual_memory(), name)) >> 20


def _group_limit(host: Host) -> int:
    try:
        text = host.read("/sys/fs/cgroup/memory.max")
    except Absent:
        text = host.read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if text == "max" or int(text) >= 1 << 60:
        raise Absent("no limit")
    return int(text) >> 20


def _address_limit(host: Host) -> int:
    line = next(
        (x for x in host.read("/proc/self/limits").splitlines() if "address space" in x), ""
    )
    soft = line.removeprefix("Max address space").split()[:1]
    if not soft or soft[0] == "unlimited":
        raise Absent("no limit" if soft else "/proc/self/limits has no address space")
    return int(soft[0]) >> 20


def _chosen(text: str) -> str:
    """The bracketed word of `always [madvise] never`."""
    return text[text.index("[") + 1 : text.index("]")]


def _numa(facts: Facts, host: Host) -> None:
    folder = "/sys/devices/system/node"
    nodes = facts.ask(
        "numa.nodes", f"{folder}/online", lambda: cpu_list(host.read(f"{folder}/online"))
    )
    for node in nodes or ():
        source = f"{folder}/node{node}/cpulist"
        facts.ask(f"numa.node{node}.cpus", source, partial(_list, host, source))
    facts.ask("numa.allowed", SELF, lambda: cpu_list(host.field(SELF, "Mems_allowed_list")))
    facts.ask("numa.balancing", BALANCING, lambda: int(host.read(BALANCING)))
    for bound, (new, old) in PERIODS.items():
        name = f"numa.scan_period_{bound}_ms"
        if facts.ask(name, new, partial(_number, host, new)) is None:
            facts.ask(name, old, partial(_number, host, old))
