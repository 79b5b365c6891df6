"""`sitsopt calibrate MODEL`: the weights of a recipe, made with the least loss, round by round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sitsopt.cli._common import ModelOptions, emit, progress, show

if TYPE_CHECKING:
    from sitsopt.calibrate.state import Round

SHOWN = 12


def calibrate(
    given: ModelOptions,
    *,
    text: str = "",
    rounds: int | None = None,
    tokens: int = 16384,
    out: str = "",
    as_json: bool = False,
) -> int:
    """Calibrate and keep the result. Exit status: 0 done, 2 bad input, 130 interrupted (a later run goes on)."""
    from sitsopt.measure.calibrate import CalibrateOptions, run
    from sitsopt.measure.models import load

    options = CalibrateOptions(
        given.sits(), Path(text) if text else None, rounds, tokens, out=Path(out) if out else None
    )
    with progress() as say:
        say("loading the model")
        loaded = load(given.model, given.dtype, given.trust)
        result = run(loaded, options, say, lambda name, r: say(_line(name, r)))
    if as_json:
        emit(result)
    else:
        _print(result)
    return 0


def _line(name: str, r: Round) -> str:
    return f"{name}, round {r.number} ({r.how}): KL {r.kl:.4g}, mean absolute error {100 * r.mean_mae:.2f} %"


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    for one in result["sets"]:
        rounds = Table(
            title=f"{one['name']}: {one['bits']:.2f} bits a weight", title_justify="left"
        )
        for name in ("round", "", "KL a token", "mean abs. error of a layer's output"):
            rounds.add_column(name)
        for r in one["rounds"]:
            rounds.add_row(str(r["round"]), r["how"], f"{r['kl']:.4g}", f"{100 * r['mae']:.2f} %")
        show(rounds)
        _layers(one)
        print(f"kept in {one['file']}")


def _layers(one: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(
        title=f"the {SHOWN} most sensitive of {len(one['layers'])} layers", title_justify="left"
    )
    for name in ("layer", "form", "bits", "KL at the nearest", "now", "error by round"):
        table.add_column(name)
    for row in one["layers"][:SHOWN]:
        near = ", ".join(f"{form} {kl:.2g}" for form, kl in row["kl_by_form"].items())
        errors = " ".join(f"{100 * e:.1f}%" for e in row["mae"])
        table.add_row(
            row["layer"], row["form"], f"{row['bits']:.2f}", near, f"{row['kl']:.2g}", errors
        )
    show(table)
