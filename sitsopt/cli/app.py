"""The command line: every verb, its options and an example. What a verb does stands in its own module,
which is imported only when the verb runs: `--help` and `rules` load no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from sitsopt.cli import _common as c
from sitsopt.cli import _files
from sitsopt.cli._status import status

app = typer.Typer(
    name="sitsopt",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"sitsopt {version('sitsopt')}")
        raise typer.Exit


@app.callback()
def common(
    shown: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A declarative graph-rewrite backend for torch.compile: run, explain, check, measure."""


@app.command()
def run(
    model: c.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer.", show_default=False)
    ] = None,
    new: c.New = 128,
    against: Annotated[str, typer.Option(help="Also time eager, inductor or sits:RECIPE.")] = "",
    rounds: Annotated[int, typer.Option(help="Alternated timed runs of each engine.")] = 3,
    demo: Annotated[bool, typer.Option("--demo", help="The same as --against inductor.")] = False,
    recipe: c.Recipe = "auto",
    target: c.Target = "auto",
    set_: c.Set = None,
    path: c.SearchPath = None,
    dtype: c.Dtype = "bf16",
    trust_remote_code: c.Trust = False,
    as_json: c.Json = False,
) -> int:
    """Generate text; tokens/s, memory, what was applied.

    `sitsopt run smollm2 "Why is the sky blue?" --against inductor`
    """
    from sitsopt.cli import run as verb

    given = _given(model, recipe, target, set_, path, dtype, trust_remote_code)
    return verb.run(
        given, prompt or verb.PROMPT, new=new, against=against, rounds=rounds, demo=demo,
        as_json=as_json,
    )  # fmt: skip


@app.command()
def bench(
    model: Annotated[str, typer.Argument(help="As for run; none with --kernels.")] = "",
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Kernels alone, beside a read probe and ATen.")
    ] = False,
    against: Annotated[
        str, typer.Option(help="eager, inductor, sits:RECIPE, llama.cpp: a list.")
    ] = "eager,inductor",
    context: Annotated[int, typer.Option(help="Tokens of text before the first new one.")] = 512,
    new: c.New = 64,
    rounds: Annotated[int, typer.Option(help="Alternated runs; the medians count.")] = 5,
    starts: Annotated[
        bool, typer.Option(help="Also measure start-up and memory, in fresh processes.")
    ] = True,
    text: Annotated[
        str, typer.Option(help="Stress speculation instead: copy, code, open or files, a list.")
    ] = "",
    drafts: Annotated[
        str, typer.Option(help="With --text: prompt-lookup, layer-skip, int4, model:NAME, a list.")
    ] = "",
    plot: Annotated[str, typer.Option(help="With --text: also draw it into this .svg file.")] = "",
    quick: c.Quick = False,
    recipe: c.Recipe = "auto",
    target: c.Target = "auto",
    set_: c.Set = None,
    path: c.SearchPath = None,
    dtype: c.Dtype = "bf16",
    trust_remote_code: c.Trust = False,
    as_json: c.Json = False,
) -> int:
    """Engines side by side in alternated runs: medians, ratios, start-up, memory.

    `sitsopt bench smollm2 --against eager,inductor,llama.cpp --context 7000 --json`

    `sitsopt bench smollm2 --recipe auto,speculate --text copy,open --drafts prompt-lookup,int4`
    """
    from sitsopt.cli import bench as verb

    if kernels:
        return verb.kernels(as_json)
    given = _given(model, recipe, target, set_, path, dtype, trust_remote_code)
    if text:
        return verb.stress(
            given, texts=text, drafts=drafts, plot=plot, quick=quick, as_json=as_json
        )
    return verb.bench(
        given, against=against, context=context, new=new, rounds=rounds, starts=starts,
        as_json=as_json,
    )  # fmt: skip


@app.command()
def check(
    model: c.Model,
    quick: c.Quick = False,
    ppl_within: c.Within = None,
    recipe: c.Recipe = "auto",
    target: c.Target = "auto",
    set_: c.Set = None,
    path: c.SearchPath = None,
    dtype: c.Dtype = "f32",
    trust_remote_code: c.Trust = False,
    as_json: c.Json = False,
) -> int:
    """The whole model against eager: tokens, logits, perplexity, and the error of every rewrite.

    Fails in f32 when a greedy token differs or a logit moves by more than 1e-4 of the largest, in
    bf16 and f16 when perplexity moves by more than 0.1 %.

    `sitsopt check smollm2 --quick`
    """
    from sitsopt.cli.check import check as verb

    given = _given(model, recipe, target, set_, path, dtype, trust_remote_code)
    return verb(given, quick=quick, ppl_within=ppl_within, as_json=as_json)


@app.command()
def bisect(
    model: c.Model,
    full: Annotated[
        bool, typer.Option("--full", help="Run the whole check in every trial.")
    ] = False,
    ppl_within: c.Within = None,
    recipe: c.Recipe = "auto",
    target: c.Target = "auto",
    set_: c.Set = None,
    path: c.SearchPath = None,
    dtype: c.Dtype = "f32",
    trust_remote_code: c.Trust = False,
    as_json: c.Json = False,
) -> int:
    """The smallest set of rewrites that breaks `check`: whole rules first, then their sites.

    `sitsopt bisect smollm2`
    """
    from sitsopt.cli.bisect import bisect as verb

    given = _given(model, recipe, target, set_, path, dtype, trust_remote_code)
    return verb(given, full=full, ppl_within=ppl_within, as_json=as_json)


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="As for run; or --config alone.")] = "",
    recipe: c.Recipe = "auto",
    target: c.Target = "auto",
    set_: c.Set = None,
    config: Annotated[str, typer.Option(help="A config.json: a model without weights.")] = "",
    dtype: c.Dtype = "bf16",
    graphs: Annotated[str, typer.Option(help="Which of decode, prefill, forward.")] = "",
    html: Annotated[str, typer.Option(help="Also write one page to this file.")] = "",
    why_not: Annotated[str, typer.Option(help="Every place a rule almost matched.")] = "",
    path: c.SearchPath = None,
    trust_remote_code: c.Trust = False,
    as_json: c.Json = False,
) -> int:
    """What is rewritten, what almost is and why not, what the settings come to. Compiles nothing.

    `sitsopt explain smollm2 --why-not fuse/rope`
    """
    from sitsopt.cli.explain import explain as verb

    return verb(
        model, recipe=recipe, target=target, overrides=c.listed(set_), config=config, dtype=dtype,
        graphs=graphs, html=html, why_not=why_not, as_json=as_json, path=c.listed(path),
        trust_remote_code=trust_remote_code,
    )  # fmt: skip


@app.command()
def calibrate(
    model: c.Model,
    recipe: c.Recipe = "auto,int4",
    rounds: Annotated[
        int | None, typer.Option(help="Rounds; else the recipe's.", show_default=False)
    ] = None,
    text: Annotated[str, typer.Option(help="A text file; else Python's own reference.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens of text to use.")] = 16384,
    out: Annotated[str, typer.Option(help="A folder of the search path to keep it in.")] = "",
    set_: c.Set = None,
    path: c.SearchPath = None,
    dtype: c.Dtype = "f32",
    trust_remote_code: c.Trust = False,
    as_json: c.Json = False,
) -> int:
    """Choose the packed weights of a recipe so that the output changes least; later runs use them.

    Goes on where an interrupted run stopped.

    `sitsopt calibrate smollm2 --recipe auto,int4 --set weights.*.effective_bits=4.75`
    """
    from sitsopt.cli.calibrate import calibrate as verb

    given = _given(model, recipe, "auto", set_, path, dtype, trust_remote_code)
    return verb(given, text=text, rounds=rounds, tokens=tokens, out=out, as_json=as_json)


@app.command()
def cache(
    action: Annotated[str, typer.Argument(help="info or clear.")] = "info",
    part: Annotated[str, typer.Argument(help="One part alone; see info.")] = "",
    as_json: c.Json = False,
) -> int:
    """What is kept on disk between runs, by part and size; `clear` removes it. Models compile anew then.

    `sitsopt cache clear graphs`
    """
    from sitsopt.cli.cache import cache as verb

    return verb(action, part, as_json=as_json)


@app.command()
def doctor(
    command: Annotated[
        list[str] | None, typer.Argument(help="Run under the plan, with --apply: -- COMMAND ...")
    ] = None,
    model: Annotated[str, typer.Option(help="Also load this model, and try settings on it.")] = "",
    recipe: c.Recipe = "auto",
    target: c.Target = "auto",
    set_: c.Set = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do what is planned, then take it back.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing, start nothing.")] = False,
    path: c.SearchPath = None,
    dtype: c.Dtype = "bf16",
    trust_remote_code: c.Trust = False,
    as_json: c.Json = False,
) -> int:
    """The machine, what each hook plans and refuses and why, the kernel cache, where a start's time goes.

    `sitsopt doctor --apply -- python serve.py`
    """
    from sitsopt.cli.doctor import doctor as verb
    from sitsopt.measure.doctor import Asked

    asked = Asked(
        model, recipe, target, c.listed(set_), c.listed(path), dtype, trust_remote_code, apply, quick,
        tuple(command or ()),
    )  # fmt: skip
    return verb(asked, as_json=as_json)


for _verb in (_files.rules, _files.recipes, _files.targets, _files.verify, _files.kernels):
    app.command()(_verb)


def _given(
    model: str, recipe: str, target: str, set_: list[str] | None, path: Any, dtype: str, trust: bool
) -> c.ModelOptions:
    return c.ModelOptions(model, recipe, target, c.listed(set_), c.listed(path), dtype, trust)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 fine, 1 the check failed, 2 bad input, 130 interrupted."""
    sys.exit(status(app, list(sys.argv[1:] if arguments is None else arguments)))
