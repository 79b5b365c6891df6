"""`sitsopt check MODEL`: the whole model against eager, and every rewrite on its own."""

from __future__ import annotations

from typing import Any

from sitsopt.cli._common import ModelOptions, emit, progress, show

SHOWN = 12


def check(
    given: ModelOptions,
    *,
    quick: bool = False,
    ppl_within: float | None = None,
    as_json: bool = False,
) -> int:
    """Compare tokens, logits, perplexity and each rewrite. Exit status: 0 passed, 1 failed, 2 bad input."""
    from sitsopt.measure.check import check as run
    from sitsopt.measure.models import load

    options = make_options(given, quick, ppl_within)
    with progress() as say:
        say("loading the model")
        loaded = load(given.model, given.dtype, given.trust)
        result = run(loaded, options, say)
    if as_json:
        emit(result)
    else:
        _print(result)
    return 0 if result["passed"] else 1


def make_options(given: ModelOptions, quick: bool, ppl_within: float | None) -> Any:
    """How much to compare, checked before a model is loaded."""
    from sitsopt.measure.check import CheckOptions

    sits = given.sits()
    if quick:
        return CheckOptions.quick(sits, ppl_within)
    return CheckOptions(ppl_within=ppl_within, sits=sits)


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    equal = "equal" if result["tokens_equal"] else f"{len(result['tokens_differ'])} prompts differ"
    print(f"{result['model']}, {result['dtype']}, recipe {result['recipe']}, against eager")
    print(f"  greedy tokens   {equal}, logits {result['tokens_max_abs']:.3g} apart at most")
    print(
        f"  logits          {result['max_abs']:.3g} at most, {result['max_rel']:.2e} of the largest"
    )
    print(f"  KL divergence   {result['kl']:.3g} a token")
    print(
        f"  perplexity      {result['ppl_sits']:.4f}, eager {result['ppl_eager']:.4f}"
        f" ({result['ppl_delta_pct']:+.4f} %) over {result['tokens']:,} tokens"
    )
    if "kv_cache" in result:
        _print_kv(result["kv_cache"])
    rows = result.get("rewrites", [])
    if rows:
        table = Table(title=f"the largest errors of {len(rows)} rewrites", title_justify="left")
        for name in ("rewrite", "site", "max error", "of values up to"):
            table.add_column(name)
        for row in rows[:SHOWN]:
            table.add_row(row["id"], row["site"], f"{row['max_abs']:.3g}", f"{row['scale']:.3g}")
        show(table)
    for failure in result["failures"]:
        print(f"failed: {failure}")
    print("passed" if result["passed"] else "`sitsopt bisect` names the rewrites to blame")


def _print_kv(one: dict[str, Any]) -> None:
    zeroed = one["ppl_zeroed"]
    print(
        f"  through the cache  {one['policy']}: perplexity {one['ppl_sits']:.4f}, eager {one['ppl_eager']:.4f}"
        f" ({one['ppl_delta_pct']:+.4f} %) over the last {one['scored']:,} of {one['tokens']:,} tokens in steps of"
        f" {one['step']};"
    )
    print(
        f"                     {one['packed_reads']:.1%} of key reads from packed tiles; with those zeroed "
        + ("nothing to compare" if zeroed is None else f"{zeroed:.4f}")
    )
