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
    from sitsopt.stages import on_stage

    options = BenchOptions(
        given.model, split(against), context, new, given.dtype, rounds, starts, given.trust,
        given.sits(),
    )  # fmt: skip
    with progress() as say, on_stage(lambda stage: say(str(stage))):
        result = run(options, say)
    if as_json:
        emit(result)
    else:
        show(as_table(result))
    return 0


def kernels(as_json: bool = False) -> int:
    """Measure the CPU kernels beside a plain read loop and beside ATen. Exit status: 0."""
    import torch

    from sitsopt.runtime.kernels.bench import bench_kernels
    from sitsopt.runtime.machine import read_bandwidth_gbs

    with progress() as say:
        say("measuring kernels")
        lines = bench_kernels()
    if as_json:
        bandwidth = read_bandwidth_gbs(cached=False)
        emit({"threads": torch.get_num_threads(), "bandwidth_gbs": bandwidth, "kernels": lines})
    else:
        show(_kernel_table(lines))
    return 0


def stress(
    given: ModelOptions, *, texts: str, drafts: str = "", plot: str = "", quick: bool = False, as_json: bool = False
) -> int:  # fmt: skip
    """Speculation by draft, length, temperature and text. Exit status: 0, or 2 for bad input."""
    from pathlib import Path

    from sitsopt.measure.errors import InputError
    from sitsopt.measure.models import load
    from sitsopt.measure.stress import StressOptions
    from sitsopt.measure.stress import stress as run
    from sitsopt.measure.stress_plot import svg

    asked = split(texts), split(drafts)
    sits = given.sits()
    options = StressOptions.quick(*asked, sits) if quick else StressOptions(*asked, sits=sits)
    options.check()
    if plot and not Path(plot).resolve().parent.is_dir():
        raise InputError(f"--plot {plot}: there is no such folder")
    with progress() as say:
        say("loading the model")
        loaded = load(given.model, given.dtype, given.trust)
        result = {"model": loaded.name, "dtype": given.dtype, "recipe": given.recipe} | run(loaded, options, say)  # fmt: skip
    if plot:
        Path(plot).write_text(svg(result["speculation"]), encoding="utf-8")
    if as_json:
        emit(result)
        return 0
    show(_stress_table("proposals of a fixed length", result["speculation"]))
    show(_stress_table("as in use: a length that adapts", result["adaptive"]))
    for name, why in result["skipped"].items():
        print(f"{name}: {why}")
    return 0


def _stress_table(title: str, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    names = ("text", "draft", "temperature", "length", "proposed", "accepted", "KL", "drafted\nsteps", "ratio")  # fmt: skip
    for name in names:
        table.add_column(name)
    for row in rows:
        share = row["accepted"] / row["proposed"] if row["proposed"] else None
        table.add_row(
            row["text"], row["draft"], f"{row['temperature']:g}", str(row.get("length", "")), str(row["proposed"]),
            "" if share is None else f"{share:.1%}", _number(row.get("kl"), 3), f"{row['drafted']:.0%}",
            f"{row['ratio']:.2f}" + ("" if row["same_tokens"] else ", other tokens"),
        )  # fmt: skip
    return table


def _kernel_table(lines: list[dict[str, Any]]) -> Any:
    """One line a kernel; several peers share a cell."""
    from rich.table import Table

    table = Table(title="bytes a second, beside a plain read of as many", title_justify="left")
    for name in (
        "kernel",
        "shape",
        "rows",
        "dtype",
        "cached",
        "GB/s",
        "probe",
        "ratio",
        "faster than",
    ):
        table.add_column(name)
    for line in lines:
        versus = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in line["versus"].items())
        table.add_row(
            line["name"], line["shape"], str(line["rows"]), line["dtype"],
            "yes" if line["cached"] else "no", _number(line["gbs"]), _number(line["probe_gbs"]),
            _number(line["ratio"], 2), versus,
        )  # fmt: skip
    return table


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
