"""What a hook wants to do, as plain data: settings to change, advice, and what it will not do and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from .facts import Facts

# process: of this process, gone with it. start: read once at the start of a process, so only a new one can have
# it. system: outlives the process and concerns others.
Scope = Literal["process", "start", "system"]


@dataclass(frozen=True)
class Action:
    """One setting: `key` names it (`env:NCCL_ALGO`, `affinity`, `file:/proc/sys/...`), `value` is what it becomes.
    `because` are the names of the facts it follows from."""

    key: str
    value: Any
    why: str
    scope: Scope = "process"
    because: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """Something that could have been done and is not."""

    what: str
    why: str


@dataclass
class Plan:
    """A hook's whole intention. `data` is what it found, for people and for `--json`."""

    hook: str
    actions: list[Action] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def refuse(self, what: str, why: str) -> Plan:
        """Note something that is not done; the plan itself."""
        self.refused.append(Refused(what, why))
        return self

    def json(self) -> dict[str, Any]:
        """Plain data. Raises TypeError for a hook that put anything else into it."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


@dataclass(frozen=True)
class Wanted:
    """What a hook is planned for. `options` is its section of the recipe; `target` a `spec.target.Target`;
    `message_bytes` the sizes of the all-reduces that the model will make; `weights` name to tensor, the model's own;
    `measure`: the hook may run something for a second."""

    options: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    message_bytes: tuple[int, ...] = ()
    weights: Mapping[str, Any] = field(default_factory=dict)
    measure: bool = False


@runtime_checkable
class Hook(Protocol):
    """A hook into the machine. `after` names hooks whose settings come first.

    `plan` must not change anything, nor raise for facts that are unknown. `apply` changes settings through the
    ledger only, which remembers what they were; `revert` gives back what the ledger does not know of (most hooks
    have nothing). `report` is plain data about what happened since `apply`.
    """

    name: str
    after: tuple[str, ...]

    def plan(self, facts: Facts, wanted: Wanted) -> Plan: ...

    def apply(self, plan: Plan, ledger: Any) -> None: ...

    def revert(self) -> None: ...

    def report(self) -> dict[str, Any]: ...


class Settings:
    """A hook that does nothing but change settings: `apply` hands its actions to the ledger."""

    name = ""
    after: tuple[str, ...] = ()

    def apply(self, plan: Plan, ledger: Any) -> None:
        for action in plan.actions:
            ledger.apply(action, self.name)

    def revert(self) -> None:
        """Nothing beyond what the ledger gives back."""

    def report(self) -> dict[str, Any]:
        return {}
