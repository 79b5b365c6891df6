"""The command line: every verb, its options and an example. What a verb does stands in its own module,
which is imported only when the verb runs: `--help` and `rules` load no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from sitsopt.cli import _common as c
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


F32 = Annotated[str, typer.Option("--dtype", help="bf16, f16, f32 or f64.")]
New = Annotated[int, typer.Option("--new", help="Tokens to generate.")]
Within = Annotated[
    float | None,
    typer.Option(
        "--ppl-within",
        help="Let perplexity alone decide, within this many percent: for recipes that quantize.",
        show_default=False,
    ),
]


@app.command()
def run(
    model: c.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer.", show_default=False)
    ] = None,
    new: New = 128,
    against: Annotated[str, typer.Option(help="Also time eager, inductor or sits:RECIPE.")] = "",
    rounds: Annotated[int, typer.Option(help="Alternated timed runs of each engine.")] = 3,
    demo: Annotated[bool, typer.Option("--demo", help="The same as --against inductor.")] = False,
    recipe: c.Recipe = "auto",
    target: c.Target = "auto",
    set_: c.Set = None,
    path: c.SearchPath = None,
    dtype: F32 = "bf16",
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
    model: c.Model,
    against: Annotated[
        str, typer.Option(help="eager, inductor, sits:RECIPE, llama.cpp: a list.")
    ] = "eager,inductor",
    context: Annotated[int, typer.Option(help="Tokens of text before the first new one.")] = 512,
    new: New = 64,
    rounds: Annotated[int, typer.Option(help="Alternated runs; the medians count.")] = 5,
    starts: Annotated[
        bool, typer.Option(help="Also measure start-up and memory, in fresh processes.")
    ] = True,
    recipe: c.Recipe = "auto",
    target: c.Target = "auto",
    set_: c.Set = None,
    path: c.SearchPath = None,
    dtype: F32 = "bf16",
    trust_remote_code: c.Trust = False,
    as_json: c.Json = False,
) -> int:
    """Engines side by side in alternated runs: medians, ratios, start-up, memory.

    `sitsopt bench smollm2 --against eager,inductor,llama.cpp --context 7000 --json`
    """
    from sitsopt.cli.bench import bench as verb

    given = _given(model, recipe, target, set_, path, dtype, trust_remote_code)
    return verb(
        given, against=against, context=context, new=new, rounds=rounds, starts=starts,
        as_json=as_json,
    )  # fmt: skip


@app.command()
def check(
    model: c.Model,
    quick: c.Quick = False,
    ppl_within: Within = None,
    recipe: c.Recipe = "auto",
    target: c.Target = "auto",
    set_: c.Set = None,
    path: c.SearchPath = None,
    dtype: F32 = "f32",
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
    ppl_within: Within = None,
    recipe: c.Recipe = "auto",
    target: c.Target = "auto",
    set_: c.Set = None,
    path: c.SearchPath = None,
    dtype: F32 = "f32",
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
    dtype: F32 = "bf16",
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
def rules(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[ID] | new ID", show_default=False)
    ] = None,
    directory: Annotated[str, typer.Option("--dir", help="Where `new` writes.")] = "",
    path: c.SearchPath = None,
    as_json: c.Json = False,
) -> int:
    """List the rules, show one, or write a new one that works.

    `sitsopt rules fuse/qkv` - `sitsopt rules new fuse/my_rule`
    """
    from sitsopt.cli import rules as verb

    first, rest = _words(words, "rules", 2)
    if first == "new":
        _needs(rest, "rules new ID")
        return verb.new(rest, directory=directory, as_json=as_json, path=path or ())
    return verb.rules(first, as_json=as_json, path=path or ())


@app.command()
def recipes(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[ID] | new MODEL | test", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(help="What `new` calls it.")] = "",
    out: Annotated[str, typer.Option(help="The file that `new` writes.")] = "",
    path: c.SearchPath = None,
    as_json: c.Json = False,
) -> int:
    """List the recipes, show one, begin one for a model, or check them all.

    `sitsopt recipes llama` - `sitsopt recipes new ./my-model` - `sitsopt recipes test`
    """
    from sitsopt.cli import recipes as verb

    first, rest = _words(words, "recipes", 2)
    if first == "new":
        _needs(rest, "recipes new MODEL")
        return verb.new(rest, name=name, out=out, as_json=as_json)
    if first == "test":
        return verb.test(as_json=as_json, path=path or ())
    return verb.recipes(first, as_json=as_json, path=path or ())


@app.command()
def targets(
    ident: Annotated[str, typer.Argument(metavar="[ID]", show_default=False)] = "",
    path: c.SearchPath = None,
    as_json: c.Json = False,
) -> int:
    """List the machines that are known, or show one; `auto` is this machine.

    `sitsopt targets auto`
    """
    from sitsopt.cli.targets import targets as verb

    return verb(ident, as_json=as_json, path=path or ())


@app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RULE...]", show_default=False)
    ] = None,
    mutate: Annotated[
        bool, typer.Option("--mutate", help="Also drop conditions and perturb constants.")
    ] = False,
    path: c.SearchPath = None,
    as_json: c.Json = False,
) -> int:
    """Execute each rule's examples: fires, skips for the stated reason, right within its tolerance.

    `sitsopt verify fuse --mutate`
    """
    from sitsopt.cli.verify import verify as verb

    return verb(names or (), mutate, as_json, path or ())


@app.command()
def kernels(
    target: Annotated[str, typer.Option("--target", help="A target, or an architecture: sm_90.")],
    show: Annotated[str, typer.Option("--show", help="Print the code of one kernel.")] = "",
    as_: Annotated[str, typer.Option("--as", help="With --show: source, ptx or sass.")] = "source",
    family: Annotated[str, typer.Option("--family", help="Only this family.")] = "",
    jobs: Annotated[int, typer.Option("--jobs", help="Compilers at once; 0: one a core.")] = 0,
    path: c.SearchPath = None,
    as_json: c.Json = False,
) -> int:
    """Compile every generated Triton kernel for a GPU; no GPU needed. Registers, spills, roofline.

    `sitsopt kernels --target h100 --family attention`
    """
    from sitsopt.cli.kernels import kernels as verb

    return verb(
        target, show=show, as_=as_, family=family, jobs=jobs, as_json=as_json, path=path or ()
    )


def _given(
    model: str, recipe: str, target: str, set_: list[str] | None, path: Any, dtype: str, trust: bool
) -> c.ModelOptions:
    return c.ModelOptions(model, recipe, target, c.listed(set_), c.listed(path), dtype, trust)


def _words(words: list[str] | None, verb: str, most: int) -> tuple[str, str]:
    given = words or []
    if len(given) > (most if given[:1] == ["new"] else 1):
        raise typer.BadParameter(f"{verb} takes one name", param_hint="ID")
    return ([*given, "", ""])[0], ([*given, "", ""])[1]


def _needs(word: str, usage: str) -> None:
    if not word:
        raise typer.BadParameter(f"sitsopt {usage}: the last word is missing", param_hint="ID")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 fine, 1 the check failed, 2 bad input, 130 interrupted."""
    sys.exit(status(app, list(sys.argv[1:] if arguments is None else arguments)))
