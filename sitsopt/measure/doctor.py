"""What `doctor` finds: the machine, its facts, what every hook plans, how kernels and starts fare."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sitsopt.hooked import wanted
from sitsopt.measure.errors import InputError
from sitsopt.measure.fresh import ChildFailed
from sitsopt.measure.loadtime import load_time
from sitsopt.runtime.hooks import Host, Run, names, plan_hooks
from sitsopt.runtime.hooks.cpu import Cpu
from sitsopt.runtime.hooks.run import OWN
from sitsopt.spec.recipe import load_recipe

Say = Callable[[str], None]
TOKENS = 256  # of the cache in which decode steps are tried


@dataclass(frozen=True)
class Asked:
    """The options of the verb."""

    model: str = ""
    recipe: str = "auto"
    target: str = "auto"
    set: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    dtype: str = "bf16"
    trust: bool = False
    apply: bool = False
    quick: bool = False
    command: tuple[str, ...] = ()


@dataclass
class Diagnosis:
    """Everything to show. `status` is that of the command that was run under the plan."""

    target: Any
    machine: dict[str, Any]
    run: Run
    recipe: str
    kernel_cache: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    status: int = 0

    def json(self) -> dict[str, Any]:
        return {
            "target": self.target.name,
            "recipe": self.recipe,
            "machine": self.machine,
            **self.run.json(),
            "kernel_cache": self.kernel_cache,
            "load_time": self.load,
        }


def diagnose(asked: Asked, say: Say = lambda text: None, host: Host | None = None) -> Diagnosis:
    """Look, plan, and with `apply` do what is planned and run the command so. The caller reverts `run` once it has
    looked at it; an error that is raised here has reverted it. Raises SpecError and InputError."""
    if asked.command and not asked.apply:
        raise InputError("a command is run under the plan with --apply")
    from sitsopt.runtime.machine import detect_target, facts
    from sitsopt.spec.target import load_target

    target = detect_target() if asked.target == "auto" else load_target(asked.target, asked.path)
    loaded = _load(asked, say)
    owner = None if loaded is None else loaded.model
    classes = [] if owner is None else [c.__name__ for c in type(owner).__mro__]
    recipe = load_recipe(asked.recipe, classes, asked.path, asked.set)
    say("asking the machine, trying settings")
    run = plan_hooks(
        _sections(recipe), wanted(owner, target, measure=not asked.quick and host is None), host,
        scopes=("process", "system") if asked.apply else (), new_process=bool(asked.command),
        given=_hooks(loaded, asked),
    )  # fmt: skip
    found = Diagnosis(target, facts().as_dict(), run, recipe.name)
    if not asked.quick:
        say("starting a fresh process")
        found.load = _start(asked)
    found.kernel_cache = kernel_cache()
    if asked.apply:
        try:
            run.apply()
            found.status = _command(asked.command)
        except BaseException:
            run.revert()
            raise
    return found


def _load(asked: Asked, say: Say) -> Any:
    if not asked.quick:
        import torch  # noqa: F401  hooks try settings of torch only where it is loaded
    if not asked.model:
        return None
    from sitsopt.measure import models

    say(f"loading {asked.model}")
    return models.load(asked.model, asked.dtype, asked.trust)


def _sections(recipe: Any) -> dict[str, dict[str, Any]]:
    """Every hook is planned; those that the recipe does not name are not applied."""
    asked = recipe.hooks.sections()
    return {
        name: asked.get(name, {"apply": not asked})
        for name in [*OWN, *sorted(set(names()) - set(OWN))]
    } | asked


def _hooks(loaded: Any, asked: Asked) -> dict[str, Any]:
    """With a model the cpu hook tries settings on its own decode steps."""
    if loaded is None or asked.quick or loaded.tokenizer is None:
        return {}
    from sitsopt.measure import text
    from sitsopt.measure.decode import Decoder

    decoder, ids, left = Decoder(loaded.model, loaded.model, TOKENS), text.context_for(loaded, 8), 0
    logits: Any = None

    def step() -> None:
        nonlocal logits, left
        if not left:
            logits, left = decoder.prefill(ids), TOKENS - 9
        logits, left = decoder.step(logits), left - 1

    return {"cpu": Cpu(step)}


def kernel_cache() -> dict[str, Any]:
    """How often kernels were found on disk, since the cache was last emptied, and what lies there."""
    from sitsopt.runtime.kernels.build import cache_dir, uses

    hits, asked = uses()
    objects = list(cache_dir().glob("*.so"))
    return {
        "hits": hits,
        "asked": asked,
        "hit_rate": round(hits / asked, 4) if asked else None,
        "objects": len(objects),
        "bytes": sum(each.stat().st_size for each in objects),
    }


def _start(asked: Asked) -> dict[str, Any]:
    try:
        return vars(load_time(asked.model, asked.recipe, asked.dtype, asked.trust))
    except ChildFailed as error:
        return {"problem": str(error)}


def _command(command: Sequence[str]) -> int:
    if not command:
        return 0
    try:
        return subprocess.run(list(command), env=dict(os.environ)).returncode
    except OSError as error:
        raise InputError(f"{command[0]}: {error.strerror}") from error
