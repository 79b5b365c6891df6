"""`sitsopt run MODEL [PROMPT]`: generate text; tokens/s, memory, what was applied."""

from __future__ import annotations

import sys
from typing import Any

from sitsopt.cli._common import ModelOptions, emit, progress, show, split

PROMPT = "Explain in two sentences why the sky is blue."


def run(
    given: ModelOptions,
    prompt: str = PROMPT,
    *,
    new: int = 128,
    against: str = "",
    rounds: int = 3,
    demo: bool = False,
    as_json: bool = False,
) -> int:
    """Answer, then say how fast and what was done. Exit status: 0, or 2 for bad input."""
    from sitsopt.measure.engines import TORCH, check_names
    from sitsopt.measure.errors import InputError
    from sitsopt.measure.models import load
    from sitsopt.measure.run import Generation, RunOptions
    from sitsopt.stages import on_stage

    names = split("inductor" if demo and not against else against)
    check_names(names)
    for name in names:
        if name.split(":")[0] not in TORCH:
            raise InputError(f"`run` compares torch engines; `sitsopt bench` also runs {name}")
    options = RunOptions(prompt, new, names, rounds, given.sits())
    with progress() as say, on_stage(lambda stage: say(str(stage))):
        say(f"loading {given.model}")
        loaded = load(given.model, given.dtype, given.trust)
        generation = Generation(loaded, options)
        generation.compile(say)
    if as_json:
        answer = "".join(generation.answer())
        emit(_data(generation, answer))
        return 0
    _stream(generation)
    with progress() as say:
        timings = generation.timings(say)
    _print(generation, timings)
    return 0


def _stream(generation: Any) -> None:
    print(f"\n> {generation.options.prompt}\n")
    for piece in generation.answer():
        print(piece, end="", flush=True)
    print("\n")
    sys.stdout.flush()


def _data(generation: Any, answer: str) -> dict[str, Any]:
    import sitsopt

    loaded = generation.loaded
    timings = generation.timings(lambda text: None)
    return {
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "prompt": generation.options.prompt,
        "answer": answer,
        "prompt_tokens": generation.ids.shape[1],
        "new_tokens": generation.options.new,
        "engines": timings,
        "ratios": _ratios(timings),
        "memory_mb": round(generation.used_mb(), 1),
        "applied": sitsopt.report(loaded.model).json(),
    }


def _ratios(timings: dict[str, dict[str, Any]]) -> dict[str, float]:
    sits = timings["sits"]["decode_tps"]
    return {
        f"sits/{name}": round(sits / row["decode_tps"], 3)
        for name, row in timings.items()
        if name != "sits"
    }


def _print(generation: Any, timings: dict[str, dict[str, Any]]) -> None:
    import sitsopt
    from sitsopt.measure.run import threads_and_device
    from sitsopt.runtime.kv.account import note

    note(generation.loaded.model, generation.engines["sits"].decoder.cache)
    loaded, ratios = generation.loaded, _ratios(timings)
    where = threads_and_device(loaded)
    print(f"{loaded.name}, {str(loaded.dtype).removeprefix('torch.')}, {where}")
    for name, row in sorted(timings.items()):
        print(
            f"  {name:10} {row['decode_tps']:8.1f} tokens/s   prefill {row['prefill_tps']:8.1f}"
            f"   ready after {row['compile_s']:.1f} s"
        )
    for name, ratio in ratios.items():
        print(f"  {name}: {ratio:.2f} times as fast")
    print(f"  memory: {generation.used_mb():,.0f} MB with the weights\n")
    show(sitsopt.report(loaded.model))
