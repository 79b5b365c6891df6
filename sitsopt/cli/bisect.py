"""`sitsopt bisect MODEL`: the smallest set of rewrites that breaks `check`."""

from __future__ import annotations

from typing import Any

from sitsopt.cli._common import ModelOptions, emit, progress
from sitsopt.cli.check import make_options


def bisect(
    given: ModelOptions,
    *,
    full: bool = False,
    ppl_within: float | None = None,
    as_json: bool = False,
) -> int:
    """Search for the rewrites to blame. Exit status: 0 nothing breaks, 1 found, 2 bad input."""
    from sitsopt.measure.bisect import bisect as run
    from sitsopt.measure.models import load

    options = make_options(given, not full, ppl_within)
    with progress() as say:
        say("loading the model")
        loaded = load(given.model, given.dtype, given.trust)
        result = run(loaded, options, say)
    if as_json:
        emit(result)
    else:
        _print(result)
    return 1 if result["breaks"] else 0


def _print(result: dict[str, Any]) -> None:
    if not result["breaks"]:
        print("the check passes with every rewrite: there is nothing to find")
        return
    for failure in result["failures"]:
        print(f"failed: {failure}")
    if "note" in result:
        print(result["note"])
        return
    print(f"to blame, found in {result['trials']} trials:")
    for row in result["sites"]:
        print(f"  {row['id']} at {row['site']}  (key {row['key']})")
    print(
        'to leave it out: options={"exclude": [key]}, or `exclude:` in a recipe for the whole rule'
    )
