"""llama.cpp as a child process: a GGUF file in, timed runs out, one JSON object a line.

Through `xllamacpp`, else `llama_cpp`. Its own clock is used where it has one, so that Python's share
does not count against it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from sitsopt.measure.memory import peak_mb, rss_mb

Runner = Callable[[list[int], int], dict[str, Any]]


def main(arguments: Sequence[str]) -> None:
    """Load the file, say so, then answer each line of stdin until it ends."""
    out = _private_stdout()
    path, max_len, threads = arguments[0], int(arguments[1]), int(arguments[2])
    before, begun = rss_mb(), time.perf_counter()
    if importlib.util.find_spec("xllamacpp"):
        runner, name = _xllamacpp(path, max_len, threads), "xllamacpp"
    else:
        runner, name = _llama_cpp(path, max_len, threads), "llama_cpp"
    loaded = time.perf_counter() - begun
    settings = f"{name}, {os.path.basename(path)}, f16 cache, {threads} threads"
    first = {"settings": settings, "load_s": round(loaded, 2), "peak_mb": peak_mb() - before}
    print(json.dumps(first), file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer = runner(job["ids"], job["new"]) | {"peak_mb": round(peak_mb() - before, 1)}
        print(json.dumps(answer), file=out, flush=True)


def _private_stdout() -> TextIO:
    """Our own copy of stdout; what the native code prints there goes to stderr instead."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _xllamacpp(path: str, max_len: int, threads: int) -> Runner:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.verbosity = max_len + 8, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(ids: list[int], new: int) -> dict[str, Any]:
        # The first new token is the prefill's, as in every other engine: one more is asked for.
        request = {
            "prompt": ids, "n_predict": new + 1, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False, "stream": False,
        }  # fmt: skip
        answer = server.handle_completions(request)
        if "timings" not in answer:
            raise SystemExit(f"llama.cpp answered {answer}")
        timings = answer["timings"]
        decode = timings["predicted_ms"] * new / max(1, timings["predicted_n"])
        return {"prefill_s": timings["prompt_ms"] / 1e3, "decode_s": decode / 1e3, "tokens": []}

    return run


def _llama_cpp(path: str, max_len: int, threads: int) -> Runner:
    import llama_cpp

    model = llama_cpp.Llama(
        path, n_ctx=max_len + 8, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def next_token() -> int:
        return int(model._scores[-1].argmax())

    def run(ids: list[int], new: int) -> dict[str, Any]:
        model.reset()
        start = time.perf_counter()
        model.eval(ids)
        tokens = [next_token()]
        middle = time.perf_counter()
        for _ in range(new):
            model.eval([tokens[-1]])
            tokens.append(next_token())
        end = time.perf_counter()
        return {"prefill_s": middle - start, "decode_s": end - middle, "tokens": tokens}

    return run


if __name__ == "__main__":
    main(sys.argv[1:])
