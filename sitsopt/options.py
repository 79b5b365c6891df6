"""The options of `torch.compile(model, backend="sits", options={...})`, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .spec.errors import Pos, SpecError, did_you_mean

LOWERINGS = ("auto", "inductor", "eager", "interpret")


@dataclass(frozen=True)
class Options:
    """recipe: a name, a path, a dict or a comma-separated list (`auto` is the model family's own); target: an id
    of backends/ or `auto`; path: folders searched for rules, recipes and targets before the shipped ones; set:
    `PATH=VALUE` overrides of the recipe; strict: raise where something cannot be lowered; lowering: who compiles;
    only, exclude: site keys (see `explain --json`) to apply alone or to leave out; explain: record near misses;
    inductor: options passed on to Inductor; guard_filter_fn belongs to torch.compile, which keeps it."""

    recipe: Any = "auto"
    target: str = "auto"
    path: tuple[Path, ...] = ()
    set: tuple[str, ...] = ()
    strict: bool = False
    lowering: str = "auto"
    only: frozenset[str] | None = None
    exclude: frozenset[str] = frozenset()
    explain: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(options: Mapping[str, Any] | None) -> Options:
        """Check a plain dict. Raises SpecError naming the option, what was expected and the nearest name."""
        given = dict(options or {})
        known = [f.name for f in fields(Options)]
        for name in given:
            if name not in known:
                raise _error(
                    name, f"unknown option `{name}`", ", ".join(known), did_you_mean(name, known)
                )
        for name, check, expected in CHECKS:
            if name in given and not check(given[name]):
                raise _error(name, f"`{name}` is {given[name]!r}", expected)
        if given.get("lowering", "auto") not in LOWERINGS:
            wrong = str(given["lowering"])
            raise _error("lowering", f"unknown lowering `{wrong}`", " | ".join(LOWERINGS),
                         did_you_mean(wrong, LOWERINGS))  # fmt: skip
        for name in ("path", "set"):
            value = given.get(name, ())
            values = (value,) if isinstance(value, (str, Path)) else tuple(value)
            given[name] = tuple(Path(v) for v in values) if name == "path" else values
        if given.get("only") is not None:
            given["only"] = frozenset(given["only"])
        given["exclude"] = frozenset(given.get("exclude", ()))
        return Options(**given)

    def allows(self) -> Callable[[str], bool]:
        """Whether a site key may be rewritten."""
        only, exclude = self.only, self.exclude
        return lambda key: (only is None or key in only) and key not in exclude


def _list(value: Any) -> bool:
    return isinstance(value, (str, Path)) or (
        isinstance(value, Sequence) and not isinstance(value, bytes)
    )


def _names(value: Any) -> bool:
    return value is None or (not isinstance(value, str) and all(isinstance(v, str) for v in value))


CHECKS: list[tuple[str, Callable[[Any], bool], str]] = [
    ("recipe", lambda v: isinstance(v, (str, Path, dict, list)), "a recipe's name, a path, a dict, or a list of them"),
    ("target", lambda v: isinstance(v, str), "`auto` or the id of a target (see `sitsopt targets`)"),
    ("path", _list, "a folder or a list of folders"),
    ("set", _list, "`PATH=VALUE` or a list of them"),
    ("strict", lambda v: isinstance(v, bool), "true or false"),
    ("lowering", lambda v: isinstance(v, str), " | ".join(LOWERINGS)),
    ("only", _names, "a set of site keys, or None"),
    ("exclude", _names, "a set of site keys"),
    ("explain", lambda v: isinstance(v, bool), "true or false"),
    ("inductor", lambda v: isinstance(v, dict), "a dict of Inductor's options"),
]  # fmt: skip


def _error(name: str, problem: str, expected: str, hint: str = "") -> SpecError:
    return SpecError(Pos("options"), problem, expected=expected, hint=hint, path=name)
