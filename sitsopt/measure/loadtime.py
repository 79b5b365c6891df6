"""Where the time of a start goes, stage by stage, in a fresh process; and how its kernels were had."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

# Nothing here imports torch: the child times that.
T = TypeVar("T")


@dataclass
class LoadTime:
    """`stages` are seconds in order; `kernels` counts those found in the cache and those that were built; with a
    model `graphs` counts compiled calls that came from disk, and all of them."""

    stages: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=lambda: {"cached": 0, "built": 0})
    graphs: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def took(self, stage: str, work: Callable[[], T]) -> T:
        """Do something and note its seconds."""
        start = time.perf_counter()
        result = work()
        self.stages[stage] = round(time.perf_counter() - start, 3)
        return result


def load_time(
    model: str = "", recipe: str = "auto", dtype: str = "bf16", trust: bool = False
) -> LoadTime:
    """Start a fresh process and let it tell: what it imports, and with `model` weights, optimize, the first prompt
    and the first token. Raises ChildFailed."""
    given = json.dumps({"model": model, "recipe": recipe, "dtype": dtype, "trust": trust})
    from sitsopt.measure.fresh import ChildFailed

    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "sitsopt.measure.loadtime", given, str(time.time())],
        capture_output=True, text=True,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise ChildFailed("\n".join((done.stderr or done.stdout).strip().splitlines()[-6:]))
    found = LoadTime(**json.loads(lines[-1]))
    told = sum(found.stages.values())
    found.stages["the rest"] = round(max(0.0, time.perf_counter() - start - told), 3)
    return found


def _child(given: dict[str, Any], begun: float) -> LoadTime:
    found = LoadTime()
    found.stages["interpreter"] = round(max(0.0, time.time() - begun), 3)
    found.took("import torch", lambda: __import__("torch"))
    found.took("import sitsopt", lambda: __import__("sitsopt.whole"))
    _kernels(found, bool(given["model"]))
    if given["model"]:
        _model(found, given)
    return found


def _kernels(found: LoadTime, wanted: bool) -> None:
    """The ops' library. Without a model none is built: that could take long."""
    from sitsopt.emit.cpp import ops_text
    from sitsopt.runtime.kernels import load
    from sitsopt.runtime.kernels.build import is_built
    from sitsopt.runtime.kernels.toolchain import BuildError, torch_flags

    try:
        if wanted or is_built("ops", ops_text(), *torch_flags()):
            found.took("load the kernels", load.ops)
        else:
            found.notes.append(
                "the kernels are not built yet: the first model that needs them does it"
            )
    except BuildError as error:
        found.notes.append(f"no kernels, ATen does everything: {error}")
    _count(found)


def _count(found: LoadTime) -> None:
    from sitsopt.runtime.kernels import load

    built = [made for _, made in load.state().built]
    cached = sum(made.cached for made in built)
    found.kernels = {"cached": cached, "built": len(built) - cached}


def _model(found: LoadTime, given: dict[str, Any]) -> None:
    from sitsopt.measure import models, text
    from sitsopt.measure.decode import Decoder
    from sitsopt.whole import compiled_call

    found.took("import transformers", models.transformers)
    loaded = found.took(
        "weights", lambda: models.load(given["model"], given["dtype"], given["trust"])
    )
    options = {"recipe": given["recipe"]}
    call = found.took("read the recipe", lambda: compiled_call(loaded.model, options))
    ids = text.context_for(loaded, 32)
    decoder = Decoder(loaded.model, call, 64)
    found.took("first prompt", lambda: decoder.run(ids, 1))
    found.took("again, ready", lambda: decoder.run(ids, 1))
    _count(found)
    found.graphs = {"from_disk": call.from_disk, "all": len(call.entries)}


def main() -> None:
    """Entry of the child: what to load as JSON and when it was started in, a line of JSON out."""
    print(json.dumps(asdict(_child(json.loads(sys.argv[1]), float(sys.argv[2])))), flush=True)


if __name__ == "__main__":
    main()
