"""A target: what the cost model and the kernel generators know about one kind of machine.

A file of `backends/` holds facts, each with a source; what is not known is null. `extends` takes another
target's facts and changes some of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from .errors import Pos, SpecError, did_you_mean
from .locate import files, find
from .merge import bases, document, merge, read_map
from .source import Document, Spec, build

Device = Literal["cpu", "cuda", "hip"]
Pass = Literal["channels_last"]
LevelName = Literal["shared", "l1", "l2", "l3"]
DTypeName = Literal["f64", "f32", "tf32", "f16", "bf16", "f8e4m3", "f8e5m2", "i8"]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(gt=0)]
Amount = Annotated[float, Field(gt=0)]


class Detect(Spec):
    """When the running machine is this target. Of several that fit, the one that asks for most wins."""

    device: Device | None = Field(
        default=None, description="The kind of device, as torch names it."
    )
    names: list[Text] | None = Field(
        default=None,
        description="Exact device names; a slice or a variant of a card has another name.",
    )
    arch: Text | None = Field(default=None, description="sm_NN or gfxNNN.")
    flags: list[Text] | None = Field(
        default=None, description="CPU flags, as /proc/cpuinfo spells them."
    )

    def score(
        self, device: str, *, name: str = "", arch: str = "", flags: Collection[str] = ()
    ) -> int | None:
        """How many conditions a machine meets; None when it fails one."""
        wanted = self.flags or []
        if (
            self.device != device
            or (self.names is not None and name not in self.names)
            or (self.arch is not None and arch != self.arch)
            or not set(wanted) <= set(flags)
        ):
            return None
        return 1 + len(wanted) + 10 * (self.arch is not None) + 100 * (self.names is not None)


class Level(Spec):
    """One level of on-chip memory."""

    size_kb: Amount | None = Field(default=None, description="KiB in one instance.")
    per: Literal["unit", "die", "device"] = Field(
        description="What has one instance: a unit (SM, CU or core), a die, the whole device."
    )
    per_block_kb: Amount | None = Field(
        default=None, description="KiB that one thread block may take."
    )


class Memory(Spec):
    """Main memory and what stands before it."""

    bandwidth_gbs: Amount | None = Field(
        default=None, description="Peak read bandwidth in 10^9 bytes/s."
    )
    size_gb: Amount | None = Field(
        default=None, description="Capacity in GB, as the data sheet counts."
    )
    channels: Count | None = Field(
        default=None, description="Channels over which addresses are spread."
    )
    fragmentation: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Share of fragmented memory from which on a guard steps down."
    )
    levels: dict[LevelName, Level | None] | None = None


class Compute(Spec):
    """Arithmetic, and the limits that decide occupancy."""

    peak_tflops: dict[DTypeName, Amount | None] | None = Field(
        default=None,
        description="Dense 10^12 operations/s by operand type, on tensor cores where they exist.",
    )
    units: Count | None = Field(default=None, description="SMs, CUs or cores.")
    warp: Count | None = Field(default=None, description="Threads that run in step.")
    max_registers: Count | None = Field(default=None, description="32-bit registers of one thread.")
    unit_registers: Count | None = Field(default=None, description="32-bit registers of one unit.")
    max_threads_per_block: Count | None = None
    max_threads_per_unit: Count | None = None
    max_blocks_per_unit: Count | None = None
    features: list[Text] | None = Field(
        default=None, description="Instruction sets that generated code may use (CPU flags)."
    )


class Links(Spec):
    """What joins the device to others, and what one kernel costs to start."""

    nvlink_gbs: Amount | None = Field(default=None, description="GB/s, both directions together.")
    xgmi_gbs: Amount | None = Field(default=None, description="GB/s, both directions together.")
    pcie_gbs: Amount | None = Field(default=None, description="GB/s, both directions together.")
    launch_us: Amount | None = Field(
        default=None, description="Microseconds between kernels (GPU) or parallel regions (CPU)."
    )
    host_launch_us: Amount | None = Field(
        default=None,
        description="Microseconds that the host takes to start one kernel, outside a graph.",
    )


class Target(Spec):
    """A file of `backends/`, with everything that it extends filled in."""

    summary: Text
    extends: Text | None = None
    detect: Detect | None = None
    emitter: Literal["cpp", "triton"]
    arch: Text = Field(description="sm_NN, gfxNNN, or what a C++ compiler takes after -march=.")
    memory: Memory = Memory()
    compute: Compute = Compute()
    links: Links = Links()
    passes: list[Pass] = Field(default=[], description="Optional passes that pay on this target.")
    sources: list[Text] = Field(min_length=1, description="Where each fact comes from.")

    _name: str = PrivateAttr("")
    _doc: Document | None = PrivateAttr(None)

    @property
    def name(self) -> str:
        """The target's id: the name of its file."""
        return self._name

    @property
    def triton(self) -> tuple[str, int | str, int] | None:
        """What `triton.backends.compiler.GPUTarget` takes; None when Triton has no such target."""
        warp = self.compute.warp
        if self.emitter != "triton" or warp is None:
            return None
        if self.arch.startswith("sm_"):
            return "cuda", int(self.arch.removeprefix("sm_")), warp
        return "hip", self.arch, warp

    def peak_tflops(self, dtype: str) -> float | None:
        """Dense peak of an operand type (`bf16`, `f8e4m3`, ...) in 10^12 operations a second."""
        peaks: dict[Any, float | None] = dict(self.compute.peak_tflops or {})
        return peaks.get(dtype)

    def level(self, name: LevelName) -> Level | None:
        """A level of on-chip memory, where the target says anything of it."""
        return (self.memory.levels or {}).get(name)

    def origin(self, path: tuple[str | int, ...]) -> Pos:
        """Which file and line set the value at `path`."""
        return self._doc.at(path) if self._doc else Pos(self.name)

    def with_facts(self, *, memory: Memory | None = None, compute: Compute | None = None) -> Target:
        """This target with what a measurement or the operating system says of one machine."""
        known = {"memory": memory or self.memory, "compute": compute or self.compute}
        return self.model_copy(update=known)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the id; unknown facts stay as null."""
        return {"id": self.name, **self.model_dump(exclude={"extends"})}


def load_target(name: str, extra: Sequence[str | Path] = (), *, pos: Pos | None = None) -> Target:
    """The target called `name`, which is an id of `backends/` or an architecture such as `sm_90`.

    Of several targets of one architecture it is one whose memory is known, and the one that the others
    extend: sm_90 is h100.
    """
    known = files("backends", extra)
    if name in known:
        return _load(known[name], name, extra)
    same = [target for target in all_targets(extra) if target.arch == name]
    same = [target for target in same if target.memory.bandwidth_gbs] or same
    for target in same:
        if target.extends not in {other.name for other in same}:
            return target
    names = sorted({*known, *(target.arch for target in all_targets(extra))})
    raise SpecError(
        pos or Pos(f"target {name}"),
        f"there is no target `{name}`",
        expected="one of " + ", ".join(sorted(known)) + ", or an architecture such as sm_90",
        hint=did_you_mean(name, names),
    )


def all_targets(extra: Sequence[str | Path] = ()) -> list[Target]:
    """Every target there is, by name."""
    return [_load(path, name, extra) for name, path in sorted(files("backends", extra).items())]


def _load(path: Path, name: str, extra: Sequence[str | Path]) -> Target:
    def lookup(base: str, doc: Document, at: Path) -> Path:
        below = at if base == at.stem else None
        return find("backends", base, extra, pos=doc.at(("extends",)), below=below)

    doc = read_map(path)
    root = doc.root
    for below in reversed(bases(doc, path, lookup)):
        root = merge(read_map(below).root, root)
    merged = document(root, str(path))
    target = build(Target, merged)
    target._name, target._doc = name, merged
    return target
