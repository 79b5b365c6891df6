"""What a recipe may say. Loading and merging are in `recipe.py`, checks between keys in `recipe_check.py`.

A key may also be null in a file that lies on top of another: null takes back what stands below, and is gone
before the recipe is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from .errors import Pos, SpecError
from .expect import Expectation, expectation
from .merge import text_at
from .select import Classes, select
from .source import Document, Spec

Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Scheme = Literal["fp8", "int8", "int4", "stored"]
StepName = Literal["pools", "cache", "speculation", "graphs", "plain"]
Profitability = Literal["measure", "model", "always"]


class Weight(Spec):
    """What happens to the weights of the modules that `match` selects: a `scheme`, or `skip` with why."""

    match: Text = Field(description="A selector; see docs of `sitsopt.spec.select`.")
    scheme: Scheme | None = Field(
        default=None,
        description="How the weights are stored; `stored`: with the numbers of the file that the model came from.",
    )
    skip: Text | None = Field(default=None, description="Leave them as they are; says why.")
    group: Annotated[int, Field(ge=8)] | None = Field(
        default=None, description="Inputs that share a scale. Without it a whole row does."
    )
    zero_point: bool = Field(
        default=False, description="int4, int8: a zero point beside the scale."
    )
    activations: Literal["int8"] | None = Field(
        default=None,
        description="Round a layer's inputs to 8-bit integers too, a scale for every 64 or fewer of them.",
    )
    rounds: Annotated[int, Field(ge=1, le=100)] | None = Field(
        default=None, description="Rounds of calibration; without it the nearest value is taken."
    )
    per: Literal["tensor", "row", "block"] | None = Field(
        default=None, description="fp8: what shares a scale; a block is 128 x 128."
    )
    effective_bits: Annotated[float, Field(gt=2, le=16)] | None = Field(
        default=None, description="A budget of bits a weight: calibration chooses what gets more."
    )
    release: bool = Field(
        default=False, description="Give the full-precision weights back once the others are made."
    )

    def __str__(self) -> str:
        if self.scheme is None:
            return f"{self.match} as it is"
        if self.scheme == "stored":
            return f"{self.match} as the file stores it"
        group = f"group {self.group}" if self.group else "one scale a row"
        rounds = f"{self.rounds} rounds" if self.rounds else ""
        flags = [name for name in ("zero_point", "release") if getattr(self, name)]
        return f"{self.match} in " + ", ".join(filter(None, [self.scheme, group, rounds, *flags]))


class KVCache(Spec):
    """A cache of keys and values that keeps recent tokens exact and stores older ones in few bits."""

    policy: Literal["hotness-aware", "recency", "int4", "int8", "none"] = Field(
        description="What stays exact: recent and often attended tokens, recent ones, nothing (int4,"
        " int8), or everything (none)."
    )
    bits: Literal[4, 8] = Field(default=4, description="Bits of a stored value.")
    window: Annotated[int, Field(ge=0)] = Field(
        default=512, description="Newest tokens that stay exact."
    )
    sinks: Annotated[int, Field(ge=0)] = Field(
        default=4, description="First tokens that stay exact."
    )
    hot_budget: Share = Field(
        default=0.02, description="hotness-aware: share of the older tokens that may stay exact."
    )
    fallback_threshold: Share = Field(
        default=0.75,
        description="hotness-aware: a tile stays exact whose attention mass, relative to the layer's"
        " 99th percentile, is at least this.",
    )
    max_seq_len: Annotated[int, Field(ge=1)] = Field(
        default=8192, description="Tokens that the cache has room for."
    )


class Speculate(Spec):
    """Several tokens proposed at once and checked in one step of the model."""

    draft: Text = Field(
        description="`prompt-lookup`, `layer-skip`, `int4` or `int8` (the model itself in so many bits), or a model that"
        " proposes (`model:NAME`)."
    )
    max_tokens: Annotated[int, Field(ge=1, le=256)] = Field(
        default=16, description="Tokens proposed at once, at most."
    )
    acceptance: Literal["exact", "adaptive"] = Field(
        default="exact",
        description="exact: the output has the distribution of the model alone; adaptive: it may not.",
    )
    entropy_ratio: Annotated[float, Field(gt=0)] = Field(
        default=0.3,
        description="adaptive: reject where the divergence of draft and model exceeds this share of"
        " the model's entropy.",
    )


class Regions(Spec):
    """What is captured and replayed as a whole (CUDA Graphs on a GPU)."""

    use: list[Text] = Field(description="Region rules, by the name of their file.")
    require: Share | None = Field(
        default=None, description="Share of a step's kernels that must be inside a region."
    )


class Hook(Spec):
    """A hook into the machine. It always plans; it acts on the plan unless `apply` is false."""

    apply: bool = Field(default=True, description="Do what was planned, not only report it.")


class Guard(Hook):
    """Steps down before memory runs out; what is not given comes from the target."""

    failures: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Failed or retried allocations a minute (3 without it)."
    )
    fragmentation: Share | None = Field(
        default=None, description="Share of the allocator's memory in pieces that nothing uses."
    )
    headroom_mb: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="MiB that stay free."
    )
    steps: list[StepName] | None = Field(
        default=None, min_length=1, description="What to give up, in this order."
    )


class Hooks(Spec):
    """Hooks into the machine, by name."""

    cpu: Hook | None = Field(default=None, description="Threads, cores and NUMA nodes.")
    guard: Guard | None = Field(default=None, description="Steps down before memory runs out.")
    hbm: Hook | None = Field(default=None, description="Where large buffers lie.")
    nvlink: Hook | None = Field(default=None, description="Which devices talk to which.")
    streams: Hook | None = Field(default=None, description="Side streams for independent branches.")
    others: dict[str, Hook] = Field(
        default={}, description="Installed hooks of the entry point group `sitsopt.hooks`, by name."
    )

    def sections(self) -> dict[str, dict[str, Any]]:
        """The hooks that are asked for, each with its settings."""
        own = [n for n in type(self).model_fields if n != "others" and n in self.model_fields_set]
        asked = {name: getattr(self, name) for name in own} | self.others
        return {name: hook.model_dump() for name, hook in asked.items() if hook is not None}


class Recipe(Spec):
    """A file of `recipes/`, or several on top of one another."""

    summary: Text | None = None
    for_: list[Text] | None = Field(
        default=None, alias="for", description="Class names; the nearest in a model's MRO wins."
    )
    extends: Text | None = Field(default=None, description="The recipe that this one lies on.")
    include: dict[str, Text] = Field(
        default={}, description="Only these rules, each with why: `fuse/rope`, or `fuse/*`."
    )
    exclude: dict[str, Text] = Field(
        default={}, description="Not these rules, each with why: `fuse/rope`, or `fuse/*`."
    )
    weights: list[Weight] = Field(
        default=[], description="The first entry that matches a module wins."
    )
    kv_cache: KVCache | None = None
    speculate: Speculate | None = None
    regions: Regions | None = None
    hooks: Hooks = Hooks()
    profitability: Profitability = Field(
        default="measure",
        description="A rewrite stays when it is faster as measured, when the cost model says so, or always.",
    )
    expect: dict[str, int | str] = Field(
        default={}, description="How often a rule must fire, over the model's config."
    )

    _name: str = PrivateAttr("")
    _doc: Document | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Equal settings; where they were written does not count."""
        return isinstance(other, Recipe) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]

    @property
    def name(self) -> str:
        """What it was loaded from, such as `llama,int4`."""
        return self._name

    def origin(self, path: str | tuple[str | int, ...]) -> Pos:
        """Which file and line set the value at `path` (dotted text, or its parts)."""
        if isinstance(path, str):
            path = tuple(int(part) if part.isdigit() else part for part in path.split("."))
        return self._doc.at(path) if self._doc else Pos(self.name or "recipe")

    def as_dict(self) -> dict[str, Any]:
        """The settings as a file would write them: plain data, nothing that is not set."""
        return self.model_dump(by_alias=True, exclude_unset=True)

    def excluded(self, rule: str) -> str | None:
        """Why a rule may not be used, or None when it may."""
        for pattern, reason in self.exclude.items():
            if matches_rule(pattern, rule):
                return reason
        if self.include and not any(matches_rule(pattern, rule) for pattern in self.include):
            return "the recipe includes only " + ", ".join(self.include)
        return None

    def weights_of(self, names: Iterable[str], classes: Classes | None = None) -> dict[str, Weight]:
        """The entry of `weights` for each of `names` (linear layers) that one selects.

        `classes` is as in `select`. Raises SpecError for an entry that is left with nothing.
        """
        names, chosen = list(names), dict[str, Weight]()
        for index, weight in enumerate(self.weights):
            pos = self.text_at(("weights", index, "match"))
            found = select(names, weight.match, classes, pos=pos)
            taken = [name for name in found if name in chosen]
            if len(taken) == len(found):
                first = chosen[taken[0]].match
                raise SpecError(pos, f"entries above take all that `{weight.match}` selects",
                                hint=f"the first match wins: write this one before `{first}`",
                                path=f"weights[{index}].match")  # fmt: skip
            chosen.update({name: weight for name in found if name not in chosen})
        return chosen

    def expectations(self) -> list[Expectation]:
        """The entries of `expect`, parsed."""
        return [
            expectation(rule, wanted, self.text_at(("expect", rule)))
            for rule, wanted in self.expect.items()
        ]

    def key_at(self, path: tuple[str | int, ...]) -> Pos:
        """Where the key at `path` stands."""
        return self._doc.at(path, key=True) if self._doc else self.origin(path)

    def text_at(self, path: tuple[str | int, ...]) -> Pos:
        """Where the text at `path` starts, behind its quote."""
        return text_at(self._doc, path) if self._doc else self.origin(path)


def matches_rule(pattern: str, rule: str) -> bool:
    """Whether a key of `include` or `exclude` means a rule: `fuse/rope`, or `fuse/*`."""
    parts, names = pattern.split("/"), rule.split("/")
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))
