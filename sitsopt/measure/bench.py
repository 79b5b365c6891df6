"""`bench`: engines side by side on one model, in alternated runs, as medians and ratios."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sitsopt.measure import fresh, text
from sitsopt.measure.decode import Run
from sitsopt.measure.engines import CHILDREN, SitsOptions, TorchEngine, check_names, torch_engine
from sitsopt.measure.errors import InputError
from sitsopt.measure.foreign import ForeignEngine, why_not
from sitsopt.measure.models import Loaded, load

Say = Callable[[str], None]
Engine = TorchEngine | ForeignEngine


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. `starts` also runs a fresh process per engine for compile times and memory."""

    model: str | None
    against: tuple[str, ...] = ("eager", "inductor")
    context: int = 512
    new: int = 64
    dtype: str = "bf16"
    rounds: int = 5
    starts: bool = True
    trust: bool = False
    sits: SitsOptions = field(default_factory=SitsOptions)

    @property
    def names(self) -> list[str]:
        """Every engine, `sits` first, none twice."""
        return list(dict.fromkeys(["sits", *self.against]))

    def check(self) -> None:
        """Raise for what cannot be measured."""
        check_names(self.names)
        for name in ("context", "new", "rounds"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} is {getattr(self, name)}: at least 1")


@dataclass
class Measured:
    """One engine's runs, and what its fresh processes said (no cold start: it compiles nothing)."""

    name: str
    settings: str = ""
    cold: fresh.Start | None = None
    warm: fresh.Start | None = None
    runs: list[Run] = field(default_factory=list)
    recompiles: int = 0
    told: dict[str, Any] = field(default_factory=dict)

    def as_dict(self, context: int, new: int) -> dict[str, Any]:
        """The contract's fields, then the rest."""
        prefill = [context / run.prefill_s for run in self.runs]
        decode = [new / run.decode_s for run in self.runs]
        return {
            "prefill_tps": round(median(prefill), 2),
            "decode_tps": round(median(decode), 2),
            "compile_s": self.cold.first_s if self.cold else 0.0 if self.warm else None,
            "warm_s": self.warm.first_s if self.warm else None,
            "peak_mb": self.warm.peak_mb if self.warm else None,
            "resident_mb": self.warm.resident_mb if self.warm else None,
            "peak_cold_mb": self.cold.peak_mb if self.cold else None,
            "settings": self.settings,
            "recompiles": self.recompiles,
            **self.told,
            "prefill_runs": [round(value, 2) for value in prefill],
            "decode_runs": [round(value, 2) for value in decode],
        }


def bench(options: BenchOptions, say: Say = lambda text: None) -> dict[str, Any]:
    """Measure and return the contract's JSON. `say` hears what is going on."""
    options.check()
    say("loading the model")
    loaded = load(options.model, options.dtype, options.trust)
    skipped = {n: why for n in options.names if n in CHILDREN and (why := why_not(n, loaded))}
    measured = {name: Measured(name) for name in options.names if name not in skipped}
    with contextlib.ExitStack() as stack:
        caches = _starts(options, measured, stack, say) if options.starts else {}
        say("probing the memory's bandwidth")
        bandwidth = _bandwidth()
        engines = _engines(options, loaded, measured, caches, stack, say)
        _alternate(options, loaded, engines, measured, say)
    return _result(options, loaded, measured, skipped, bandwidth)


def _starts(
    options: BenchOptions, measured: dict[str, Measured], stack: contextlib.ExitStack, say: Say
) -> dict[str, Path]:
    """A cold and a warm start of each torch engine; the caches they filled serve the runs below."""
    caches = {}
    for name, result in measured.items():
        if name in CHILDREN:
            continue
        job = fresh.Job(
            name,
            options.model,
            None,
            options.dtype,
            options.trust,
            options.context,
            1,
            options.sits,
        )
        caches[name] = stack.enter_context(fresh.empty_caches())
        if name != "eager":
            say(f"{name}: compiling with cold caches, in a process of its own")
            result.cold = fresh.start(job, caches[name])
        say(f"{name}: starting again with warm caches")
        result.warm = fresh.start(job, caches[name])
    return caches


def _engines(
    options: BenchOptions,
    loaded: Loaded,
    measured: dict[str, Measured],
    caches: dict[str, Path],
    stack: contextlib.ExitStack,
    say: Say,
) -> list[Engine]:
    """Every engine, compiled and warm."""
    max_len = options.context + options.new + 1
    ids = text.context_for(loaded, options.context)
    engines: list[Engine] = []
    for name, result in measured.items():
        say(f"{name}: making ready")
        engine: Engine
        if name in CHILDREN:
            assert loaded.gguf is not None
            engine = ForeignEngine(name, loaded.gguf, max_len, torch.get_num_threads())
        else:
            engine = torch_engine(name, loaded, max_len, options.sits)
        stack.callback(engine.close)
        with fresh.caches_in(caches.get(name)):
            engine.run(ids, min(2, options.new))
        result.settings = engine.settings
        if isinstance(engine, ForeignEngine):
            result.warm = fresh.Start(engine.load_s, engine.peak_mb, engine.peak_mb)
        engines.append(engine)
    return engines


def _alternate(
    options: BenchOptions,
    loaded: Loaded,
    engines: Sequence[Engine],
    measured: dict[str, Measured],
    say: Say,
) -> None:
    """A B C, A B C: what changes on the machine meanwhile, changes for all of them."""
    ids = text.context_for(loaded, options.context)
    for number in range(options.rounds):
        for engine in engines:
            say(f"round {number + 1} of {options.rounds}: {engine.name}")
            with _counting(measured[engine.name]):
                measured[engine.name].runs.append(engine.run(ids, options.new))
    for engine in engines:
        if isinstance(engine, TorchEngine):
            measured[engine.name].told = engine.told()


@contextlib.contextmanager
def _counting(result: Measured) -> Iterator[None]:
    """Count graphs that Dynamo compiled meanwhile: there must be none."""
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    yield
    result.recompiles += stats["unique_graphs"] - before


def _bandwidth() -> float | None:
    from sitsopt.runtime.machine import read_bandwidth_gbs

    found = read_bandwidth_gbs(cached=False)
    return None if found is None else round(found, 1)


def _result(
    options: BenchOptions,
    loaded: Loaded,
    measured: dict[str, Measured],
    skipped: dict[str, str],
    bandwidth: float | None,
) -> dict[str, Any]:
    engines = {n: m.as_dict(options.context, options.new) for n, m in measured.items()}
    return {
        "model": loaded.name,
        "device": _device_name(loaded.device),
        "dtype": options.dtype,
        "recipe": options.sits.recipe,
        "threads": torch.get_num_threads(),
        "bandwidth_gbs": bandwidth,
        "context": options.context,
        "new_tokens": options.new,
        "rounds": options.rounds,
        "engines": engines,
        "ratios": _ratios(engines),
        "skipped": skipped,
        "text": text.digest(),
        "versions": {name: _version(name) for name in ("sitsopt", "torch", "transformers")},
    }


def _ratios(engines: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Every `sits` engine over every other one; above 1 is faster."""
    ours = [name for name in engines if name.split(":")[0] == "sits"]
    return {
        f"{mine}/{other}": {
            kind: round(engines[mine][f"{kind}_tps"] / engines[other][f"{kind}_tps"], 3)
            for kind in ("prefill", "decode")
        }
        for mine in ours
        for other in engines
        if other != mine
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from sitsopt.runtime.machine import facts

    return facts().cpu or device.type


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a checkout
