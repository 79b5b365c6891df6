"""Region rules: which parts of a graph may be captured and replayed as one piece.

    rule = load_region(path, "decode")
    rules = load_regions([tmp / "rules", shipped])      # by name; the first folder wins

A file of `rules/regions/` names ops by patterns: `aten.mul`, `aten.*`, `sits.*`. An op that no pattern of `capture`
means stays outside, and so does one that `split` means: everything behind it begins another region.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import Field, PrivateAttr

from .errors import Pos, SpecError, did_you_mean, raise_all
from .ops import NAMESPACES, known, resolve, suggest
from .rule_file import Reason
from .source import Document, Spec, build, read

FOLDER = "regions"
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]


class StreamsOf(Spec):
    """Streams beside the main one, for branches that do not need each other."""

    side: Annotated[int, Field(ge=0, le=8)] = Field(
        default=0, description="Side streams, at most; 0: everything runs on one stream."
    )
    main: list[Text] = Field(
        default=[], description="Ops that never leave the main stream, nor do their branches."
    )
    gain_us: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="Microseconds that a fork must be predicted to gain."
    )


class Captures(Spec):
    """How often a region is captured, and what for."""

    warmup: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3, description="Plain calls before a capture: they compile, tune and allocate."
    )
    most: Count = Field(default=8, description="Captures kept; the one used longest ago goes.")
    moves: Annotated[int, Field(ge=0)] = Field(
        default=4,
        description="How often a capture is made anew because a weight or cache lies elsewhere.",
    )
    buckets: list[Count] = Field(
        default=[],
        description="Sizes that a dimension which varies is captured up to; larger ones run plainly.",
    )


class MemoryOf(Spec):
    """What static buffers and pools may take; the smaller limit holds."""

    limit_mb: Annotated[float, Field(gt=0)] | None = Field(default=None, description="MiB.")
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.1, description="Share of the device's memory."
    )


class RegionFile(Spec):
    """A file of `rules/regions/`."""

    summary: Text = Field(description="One line.")
    doc: str = Field(default="", description="Why, and what to know.")
    tokens: Count | None = Field(
        default=None, description="Only graphs of a step of at most this many tokens."
    )
    capture: list[Text] = Field(min_length=1, description="Ops that may be inside a region.")
    split: dict[Text, Reason] = Field(
        default={}, description="Ops that end a region, each with the reason."
    )
    min_kernels: Count = Field(default=2, description="Smaller regions are not worth a capture.")
    streams: StreamsOf = Field(default=StreamsOf(), description="Side streams.")
    captures: Captures = Field(default=Captures(), description="Warm-up, keys and their number.")
    memory: MemoryOf = Field(default=MemoryOf(), description="Limits of memory.")

    _name: str = PrivateAttr("")
    _doc: Document | None = PrivateAttr(None)

    @property
    def name(self) -> str:
        """The name of the file."""
        return self._name

    @property
    def id(self) -> str:
        return f"{FOLDER}/{self._name}"

    @property
    def file(self) -> str:
        return self._doc.file if self._doc else ""

    def why_outside(self, op: str) -> str:
        """Why an op (`aten.mul`) may not be inside a region of this rule; empty where it may."""
        if why := self.why_split(op):
            return why
        if any(means(pattern, op) for pattern in self.capture):
            return ""
        return f"the region rule `{self._name}` does not name {op} under `capture`"

    def why_split(self, op: str) -> str:
        """Why an op ends a region by this rule; empty where it does not."""
        return next((why for pattern, why in self.split.items() if means(pattern, op)), "")

    def stays(self, op: str) -> bool:
        """Whether an op must stay on the main stream."""
        return any(means(pattern, op) for pattern in self.streams.main)


def means(pattern: str, op: str) -> bool:
    """Whether a pattern of a region rule means an op."""
    return fnmatchcase(op, pattern)


def load_region(path: str | Path, name: str, text: str | None = None) -> RegionFile:
    """The region rule in a file, or in `text`. Raises SpecError for one mistake and SpecErrors for several."""
    doc = read(path, text)
    rule = build(RegionFile, doc)
    rule._name, rule._doc = name, doc
    raise_all(list(_mistakes(rule, doc)))
    return rule


def load_regions(dirs: Sequence[str | Path]) -> dict[str, RegionFile]:
    """Every region rule of some folders of rules, by name. Raises all mistakes of all files at once."""
    errors: list[SpecError] = []
    found: dict[str, RegionFile] = {}
    for name, path in region_files(dirs).items():
        try:
            found[name] = load_region(path, name)
        except SpecError as error:
            errors.append(error)
    raise_all(errors)
    return found


def region_files(dirs: Sequence[str | Path]) -> dict[str, Path]:
    """Names of region rules and their files; a folder that comes earlier wins."""
    found: dict[str, Path] = {}
    for folder in dirs:
        for path in sorted((Path(folder) / FOLDER).glob("*.yaml")):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def _mistakes(rule: RegionFile, doc: Document) -> Iterator[SpecError]:
    for key, patterns in (("capture", rule.capture), ("split", list(rule.split))):
        for index, pattern in enumerate(patterns):
            path = (key, index) if key == "capture" else (key, pattern)
            yield from _pattern(pattern, doc.at(path, key=key == "split"), f"{key}")
    for index, pattern in enumerate(rule.streams.main):
        yield from _pattern(pattern, doc.at(("streams", "main", index)), "streams.main")
    for pattern in rule.split:
        if pattern in rule.capture:
            yield SpecError(
                doc.at(("split", pattern), key=True),
                f"`{pattern}` stands under `capture` too",
                hint="what splits is never captured: leave it out of one of them",
                path="split",
            )
    buckets = rule.captures.buckets
    if buckets != sorted(set(buckets)):
        yield SpecError(
            doc.at(("captures", "buckets")), "`buckets` are not in order", path="captures.buckets",
            expected=f"each once, the smallest first: {sorted(set(buckets))}",
        )  # fmt: skip


def _pattern(pattern: str, pos: Pos, path: str) -> Iterator[SpecError]:
    space, dot, rest = pattern.partition(".")
    if not dot or not space.isidentifier() or not rest:
        yield SpecError(pos, f"`{pattern}` is no op", expected="NAMESPACE.NAME, such as aten.mul or aten.*",
                        hint=_meant(pattern), path=path)  # fmt: skip
    elif space in NAMESPACES:
        if any(sign in rest for sign in "*?["):
            if not any(means(pattern, op) for op in known()):
                yield SpecError(pos, f"`{pattern}` means no op", path=path)
        elif resolve(pattern) is None:
            near = suggest(pattern)
            hint = f"did you mean `{near}`?" if near else ""
            yield SpecError(pos, f"there is no op `{pattern}`", hint=hint, path=path)


def _meant(name: str) -> str:
    fact = resolve(name)
    return f"did you mean `{fact.key}`?" if fact else did_you_mean(f"aten.{name}", known())
