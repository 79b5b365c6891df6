"""One engine in a fresh process: how long until it is ready with cold and with warm caches, and how
much memory it takes above the same process before loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sitsopt.measure.cachedir import cache_dir
from sitsopt.measure.engines import SitsOptions
from sitsopt.measure.errors import InputError


@dataclass(frozen=True)
class Job:
    """What the child does: load, run a prefill of `context` tokens and one decode step, run again."""

    engine: str
    model: str | None
    config: str | None = None
    dtype: str = "bf16"
    trust: bool = False
    context: int = 512
    new: int = 1
    sits: SitsOptions = field(default_factory=SitsOptions)


@dataclass(frozen=True)
class Start:
    """Seconds from a loaded model to its first decoded token, and MB above the state before loading."""

    first_s: float
    peak_mb: float
    resident_mb: float


class ChildFailed(RuntimeError):
    """The fresh process ended without a result; the message is the end of what it said."""


def start(job: Job, caches: Path | None = None) -> Start:
    """Run `job` in a fresh process, with compile caches in `caches` (None: the user's own)."""
    command = [sys.executable, "-m", "sitsopt.measure.fresh", json.dumps(asdict(job))]
    env = {**os.environ, **(cache_variables(caches) if caches else {})}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ChildFailed(f"{job.engine}: " + "\n".join(said[-8:]))
    return Start(**json.loads(lines[-1]))


def cache_variables(folder: Path) -> dict[str, str]:
    """Environment that puts every compile cache into `folder`; unpacked models and calibrated weights stay where
    they are."""
    own = folder / "sitsopt"
    own.mkdir(parents=True, exist_ok=True)
    for kept in ("models", "calibrated"):
        if not (own / kept).exists():
            (own / kept).symlink_to(cache_dir(kept).resolve())
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "SITSOPT_CACHE": str(own),
    }


@contextmanager
def caches_in(folder: Path | None) -> Iterator[None]:
    """The same for this process, for as long as the block runs."""
    if folder is None:
        yield
        return
    wanted = cache_variables(folder)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def empty_caches() -> Iterator[Path]:
    """A folder for compile caches that goes away afterwards."""
    with tempfile.TemporaryDirectory(prefix="sitsopt-bench-") as folder:
        yield Path(folder)


def run(job: Job) -> Start:
    """What the child does."""
    from sitsopt.measure import memory, models, text
    from sitsopt.measure.engines import torch_engine

    models.transformers()
    before = memory.rss_mb()
    loaded = models.load(job.model, job.dtype, job.trust, job.config)
    ids = text.context_for(loaded, job.context)
    engine = torch_engine(job.engine, loaded, job.context + job.new + 1, job.sits)
    begun = time.perf_counter()
    engine.run(ids, job.new)
    first = time.perf_counter() - begun
    engine.run(ids, job.new)
    return Start(
        round(first, 4),
        round(memory.peak_mb() - before, 1),
        round(memory.rss_mb() - before, 1),
    )


def main() -> None:
    """Entry of the child: a job as JSON in, a line of JSON out."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    given["sits"] = SitsOptions(**given["sits"])
    try:
        result = run(Job(**given))
    except InputError as error:
        sys.exit(str(error))
    print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
