"""What a rewrite leaves behind: sites, misses, stages. Plain data: `explain/` renders it, a cache can keep it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..graph.regions.plan import RegionPlan


@dataclass(frozen=True)
class Place:
    """Where in the user's model: dotted module path, and `file:line` of the model's own source."""

    module: str
    source: str
    node: str  # name of the anchor node in the captured graph


@dataclass
class Site:
    """One application of a rule. `lowered` is triton, cpp, inductor or eager; times are in microseconds."""

    rule: str
    place: Place
    key: str = ""  # what the options `only` and `exclude` call it
    spelling: int = 0
    nodes: int = 0  # graph nodes the rule took
    took: tuple[str, ...] = ()  # their names in the captured graph
    bytes_before: int | None = None
    bytes_after: int | None = None
    predicted_us: float | None = None  # on the target, as one kernel
    unfused_us: float | None = None  # on the target, a kernel an op
    lowered: str = "inductor"
    lowered_why: str = ""
    measured_us: dict[str, float] = field(default_factory=dict)
    weight_error: float | None = None  # of a packed weight, relative (root of the squares' sums)
    binding: dict[str, str] = field(default_factory=dict)

    @property
    def bytes_saved(self) -> int | None:
        if self.bytes_before is None or self.bytes_after is None:
            return None
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True)
class Miss:
    """An attempt that got past its root op and failed. `reason` is one of pattern shape dtype uses mutation
    alias grad order symbolic condition; `condition` is the text that failed, `matched` the nodes matched before,
    `of` how many the pattern has."""

    rule: str
    place: Place
    reason: str
    condition: str
    explanation: str = ""
    expected: str = ""
    found: str = ""
    matched: int = 0
    of: int = 0


@dataclass
class Tried:
    """Where one rule could have started in one graph: `roots` nodes have the op of its root; `missing` are ops of
    its pattern that the graph does not have."""

    roots: int = 0
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Effective:
    """A setting that was asked for and what came of it."""

    asked: str
    got: str
    reason: str


@dataclass
class OneFunction:
    """Whether a graph runs as one generated function, and why (not). measured_us: of a call, as `one function` and
    `op by op`, where both were measured."""

    used: bool
    why: str
    ops: int = 0  # written into it, a repeated layer's once
    measured_us: dict[str, float] = field(default_factory=dict)


@dataclass
class GraphRecord:
    """Everything that happened to one captured graph."""

    name: str
    nodes_before: int = 0
    nodes_after: int = 0
    capture_ms: float = 0.0
    rewrite_ms: float = 0.0
    compile_ms: float = 0.0
    grad: bool = False
    dynamic: bool = False
    from_disk: bool = False  # compiled by an earlier process
    fallback: str = ""  # why the whole graph was handed over unchanged, if it was
    sites: list[Site] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    tried: dict[str, Tried] = field(default_factory=dict)  # by rule, when misses are recorded
    stages: list[tuple[str, int, float]] = field(default_factory=list)  # (stage, rewrites, ms)

    repeated: list[list[str]] = field(
        default_factory=list
    )  # module paths of layers that share their code
    repeat_failed: str = ""  # why equal layers were compiled one by one after all

    left_weights: dict[str, str] = field(
        default_factory=dict
    )  # modules the recipe names, and why not

    regions: RegionPlan | None = None  # where regions were planned
    capture_notes: list[str] = field(default_factory=list)  # why regions run op by op after all
    broken: str = ""  # why the graph ends where it does, before the call does
    broken_at: str = ""  # file:line of that

    one_function: OneFunction | None = None  # where the recipe asks for it, on a CPU

    def forget_rewrites(self) -> None:
        """Before the graph is rewritten once more."""
        self.left_weights = {}
        self.sites, self.misses, self.tried, self.stages = [], [], {}, []

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Record:
    """A whole model: its graphs and the settings in force. Public name: `sitsopt.Report` wraps it."""

    target: str = ""
    recipe: str = ""
    graphs: list[GraphRecord] = field(default_factory=list)
    effective: list[Effective] = field(default_factory=list)
    loop: str = ""  # of the last generate(): `fast` or `transformers`
    loop_why: str = ""
    speculation: str = ""  # its draft, or why none was used
