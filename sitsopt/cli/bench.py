"""`sitsopt bench MODEL --against eager,inductor,llama.cpp`: engines side by side."""

from __future__ import annotations

from typing import Any

from sitsopt.cli._common import ModelOptions, emit, progress, show, split


def bench(
    given: ModelOptions,
    *,
    against: str = "eager,inductor",
    context: int = 512,
    new: int = 64,
    rounds: int = 5,
    starts: bool = True,
    as_json: bool = False,
) -> int:
    """Measure in alternated runs and print medians and ratios. Exit status: 0, or 2 for bad input."""
    from sitsopt.measure.bench import BenchOptions
    from sitsopt.measure.bench import bench as run

    options = BenchOptions(
        given.model, split(against), context, new, given.dtype, rounds, starts, given.trust,
        given.sits(),
    )  # fmt: skip
    with progress() as say:
        result = run(options, say)
    if as_json:
        emit(result)
    else:
        show(as_table(result))
    return 0


def as_table(result: dict[str, Any]) -> Any:
    """One line an engine, with what `sits` gains over it."""
    from rich.table import Table

    where = f"{result['device']}, {result['threads']} threads, {result['bandwidth_gbs']} GB/s"
    title = (
        f"{result['model']}, {result['dtype']}, {result['context']} tokens of context,"
        f" {result['new_tokens']} new; {where}"
    )
    table = Table(title=title, title_justify="left")
    for name, justify in COLUMNS:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, row in result["engines"].items():
        gain = result["ratios"].get(f"sits/{name}", {})
        table.add_row(
            name, _number(row["decode_tps"]), _number(row["prefill_tps"]),
            _number(gain.get("decode"), 2), _number(gain.get("prefill"), 2),
            _number(row["compile_s"]), _number(row["warm_s"]), _number(row["peak_mb"], 0),
        )  # fmt: skip
    notes = [f"{name}: {why}" for name, why in result["skipped"].items()]
    notes += [
        f"{name}: compiled {row['recompiles']} graphs while it was measured"
        for name, row in result["engines"].items()
        if row["recompiles"]
    ]
    if notes:
        table.caption, table.caption_justify = "\n".join(notes), "left"
    return table


COLUMNS = (
    ("engine", "left"),
    ("decode\ntok/s", "right"),
    ("prefill\ntok/s", "right"),
    ("sits is faster\ndecode", "right"),
    ("\nprefill", "right"),
    ("cold\nstart s", "right"),
    ("warm\nstart s", "right"),
    ("peak\nMB", "right"),
)


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
