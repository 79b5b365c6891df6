"""A plan as plain data: names of nodes, numbers and reasons. It can be written out, and spoiled by a test."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

BEGIN = "begin"  # the event recorded on the main stream before anything of a region runs
CONDITIONS = ("no hidden synchronisation", "resources allocated", "unified addressing")


@dataclass(frozen=True)
class Event:
    """A mark on a stream, recorded right behind a node (or at the beginning)."""

    name: str
    after: str


@dataclass(frozen=True)
class Start:
    """A node of a region on its stream, behind the events of `waits`."""

    node: str
    stream: int = 0
    waits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Input:
    """A tensor that a region reads from outside. held: read at the address it has (weights, caches), where another
    address means another capture; else copied into a static buffer before each replay. bytes: None where unknown."""

    name: str
    held: bool
    bytes: int | None


@dataclass(frozen=True)
class Slot:
    """A static buffer, and the values that take turns in it."""

    bytes: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class Condition:
    """One of CONDITIONS, whether it holds, and what it was told from."""

    name: str
    holds: bool
    why: str


@dataclass(frozen=True)
class Reordering:
    """Nodes that were taken off the main stream, and why that is allowed. us: microseconds on one stream, and as
    planned."""

    nodes: tuple[str, ...]
    streams: tuple[int, ...]
    before_us: float
    after_us: float
    conditions: tuple[Condition, ...]


@dataclass
class Region:
    """One capture. `order` is in what order its nodes are started, `needs` the dependencies among them, `joins` the
    events that the main stream waits for at the end; times in microseconds, None where a fact is unknown."""

    name: str
    order: list[Start]
    events: list[Event]
    joins: tuple[str, ...]
    needs: dict[str, tuple[str, ...]]
    inputs: list[Input]
    outputs: list[str]
    slots: list[Slot]
    kernels: int
    key: tuple[str, ...] = ()  # sizes that vary, by symbol: a capture for each set of their values
    us: float | None = None
    saved_us: float | None = None
    reorderings: list[Reordering] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # forks that were not made, and why

    @property
    def streams(self) -> int:
        return 1 + max((start.stream for start in self.order), default=0)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the static buffers for values inside."""
        return sum(slot.bytes for slot in self.slots)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the static buffers for inputs."""
        return sum(one.bytes or 0 for one in self.inputs if not one.held)


@dataclass(frozen=True)
class Outside:
    """A node in no region: why, and where in the model it comes from (`file:line`)."""

    node: str
    op: str
    reason: str
    module: str
    source: str
    us: float | None = None
    kernel: bool = True


@dataclass
class RegionPlan:
    """The regions of one graph and what is left between them, in the order of `order` (names of regions and nodes).
    refused: why there is none at all; fits: whether the rule is meant for such a graph."""

    rule: str
    regions: list[Region] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    refused: str = ""
    fits: bool = True
    limit_bytes: int | None = None

    @property
    def kernels(self) -> tuple[int, int]:
        """Kernels inside and in all."""
        inside = sum(region.kernels for region in self.regions)
        return inside, inside + sum(one.kernel for one in self.outside)

    @property
    def times(self) -> tuple[float | None, float | None]:
        """Predicted microseconds inside and in all; None where a part is unknown."""
        inside = [region.us for region in self.regions]
        outside = [one.us for one in self.outside if one.kernel]
        return _sum(inside), _sum(inside + outside)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _sum(times: list[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None
