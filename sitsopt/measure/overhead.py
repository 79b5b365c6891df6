"""What a call of a compiled model costs beside its kernels: guards, watching, argument handling.

    python -m sitsopt.measure.overhead [MODEL] [--json] [--rounds 9]

One decode step of a language model. The compiled graph is replaced by one that gives back results it made before, so
that what is left is the call itself: in sitsopt's dispatch, in stock torch.compile with its default guards, and in
stock torch.compile without guards on modules (which notices no change of the model). Alternated; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..dispatch.dispatcher import Dispatcher
from ..whole import compiled_call
from .decode import Decoder
from .engines import skip_module_guards
from .models import load

CALLS = 50  # of one case in a row


def measure(model: str = "smollm2", rounds: int = 9) -> dict[str, Any]:
    """Microseconds of a call by case; `watched` is how many tensors the dispatch looks at."""
    loaded = load(model, "bf16", False, None)
    decoder = Decoder(loaded.model, loaded.model, 64)
    arguments = {"input_ids": decoder.token, "logits_to_keep": 1, **decoder.extra}
    dispatch = compiled_call(loaded.model, {}, dynamic=False)
    unguarded: dict[str, Any] = {"guard_filter_fn": skip_module_guards}
    cases: dict[str, Callable[..., Any]] = {
        "sits": dispatch,
        "torch.compile": torch.compile(loaded.model, backend=_once(), dynamic=False),
        "torch.compile, no module guards": torch.compile(
            loaded.model, backend=_once(), dynamic=False, options=unguarded
        ),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    with torch.no_grad():
        for call in cases.values():
            call(**arguments)
        _without_kernels(dispatch, arguments)
        for _ in range(rounds):
            for name, call in cases.items():
                taken[name].append(_microseconds(call, arguments))
    return {
        "us": {name: statistics.median(times) for name, times in taken.items()},
        "tensors": len(list(loaded.model.parameters())),
        "given_up": dispatch.given_up,
    }


def _microseconds(call: Callable[..., Any], arguments: dict[str, Any]) -> float:
    call(**arguments)
    start = time.perf_counter()
    for _ in range(CALLS):
        call(**arguments)
    return (time.perf_counter() - start) / CALLS * 1e6


def _once() -> Any:
    """A backend whose graphs run once, at their compile. Another one each time: Dynamo shares code of one backend."""

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        results = gm(*inputs)
        return lambda *args: results

    return backend


def _without_kernels(dispatch: Dispatcher, arguments: dict[str, Any]) -> None:
    """Let the entry that this call finds give back what its graph has made last."""
    inputs, product = dispatch.entries[0].inputs, dispatch.entries[0].product
    made: list[Any] = []
    compiled = product.compiled

    def recorded(*args: Any) -> Any:
        made.append(compiled(*args))
        return made[-1]

    product.compiled = recorded
    inputs.compiled = product.call()
    dispatch(**arguments)
    product.compiled = lambda *args: made[-1]
    inputs.compiled = product.call()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    result = measure(given.model, given.rounds)
    if given.json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"{given.model}: microseconds of one decode call beside its kernels, {given.rounds} rounds"
    )
    for name, value in result["us"].items():
        print(f"  {name:32} {value:7.1f}")


if __name__ == "__main__":
    main()
