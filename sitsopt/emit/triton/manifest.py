"""The manifest: every kernel that must compile for every target, read from `manifest.yaml`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ..attention import FlashAttention, Merge
from ..cache import Append, Commit
from ..expr import Elementwise
from ..matmul import Matmul
from ..rope import Rope
from ..rowwise import Rowwise
from ..sample import Argmax, Draw
from . import (
    attention,
    attention_merge,
    cache_append,
    cache_commit,
    elementwise,
    matmul,
    rope,
    rowwise,
    sample,
)
from .forms import form
from .source import Source

Kernel = (
    Elementwise | Rowwise | Rope | FlashAttention | Merge | Matmul | Append | Commit | Argmax | Draw
)

_MAKERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Source]]] = {
    "elementwise": (lambda form_, **more: form(form_, **more), elementwise.source),
    "rowwise": (Rowwise, rowwise.source),
    "rope": (Rope, rope.source),
    "attention": (FlashAttention, attention.source),
    "merge": (Merge, attention_merge.source),
    "matmul": (Matmul, matmul.source),
    "append": (Append, cache_append.source),
    "commit": (Commit, cache_commit.source),
    "argmax": (Argmax, sample.argmax),
    "draw": (Draw, sample.draw),
}
_SOFTWARE_FP8 = ("sm_80", "sm_86", "gfx942")


@dataclass(frozen=True)
class Entry:
    """One kernel of the manifest. excused: why it need not compile for the target asked about."""

    kind: str
    kernel: Kernel
    source: Source
    excused: str = ""

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.source.name


@cache
def _document() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(Path(__file__).with_suffix(".yaml")))


def targets() -> list[str]:
    """The architectures that the manifest is about."""
    return list(_document()["targets"])


def entries(arch: str) -> list[Entry]:
    """Every kernel as it is generated for an architecture."""
    excuses = {e["kernel"]: e["reason"] for e in _document()["exceptions"] if arch in e["targets"]}
    made = []
    for kind in _MAKERS:
        for row in _document()[kind]:
            for values in _expand(row):
                entry = build(kind, values, arch)
                made.append(replace(entry, excused=excuses.get(entry.name, "")))
    return list({entry.name: entry for entry in made}.values())


def _expand(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    lists = [value if isinstance(value, list) else [value] for value in row.values()]
    for choice in itertools.product(*lists):
        values = dict(zip(row, choice, strict=True))
        yield {k: values.get(v, v) for k, v in values.items()}


def build(kind: str, values: dict[str, Any], arch: str) -> Entry:
    """One kernel from plain values."""
    make, _ = _MAKERS[kind]
    values = dict(values)
    if kind == "elementwise":
        values["form_"] = values.pop("form")
    elif kind == "attention":
        values.setdefault("value_dim", values["head_dim"])
    elif kind == "matmul" and values.get("weight") not in ("i4", "f8e4m3"):
        values.pop("group", None)
    return generate(kind, make(**values), arch)


def generate(kind: str, kernel: Any, arch: str) -> Entry:
    """A description's text for an architecture."""
    if arch in _SOFTWARE_FP8 and "native_fp8" in {f.name for f in fields(kernel)}:
        kernel = replace(kernel, native_fp8=False)
    return Entry(kind, kernel, _MAKERS[kind][1](kernel))
