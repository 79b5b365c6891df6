"""The verbs that take no MODEL: rules, recipes, targets and kernels, and whether the rules hold."""

from __future__ import annotations

from typing import Annotated

import typer

from sitsopt.cli import _common as c


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

    `sitsopt recipes llama` - `sitsopt recipes new smollm2` - `sitsopt recipes test`
    """
    from sitsopt.cli import recipes as verb

    first, rest = _words(words, "recipes", 2)
    if first == "new":
        _needs(rest, "recipes new MODEL")
        return verb.new(rest, name=name, out=out, as_json=as_json)
    if first == "test":
        return verb.test(as_json=as_json, path=path or ())
    return verb.recipes(first, as_json=as_json, path=path or ())


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


def kernels(
    model: Annotated[
        str, typer.Argument(help="As for run; without one, the whole manifest.", show_default=False)
    ] = "",
    target: Annotated[
        str, typer.Option("--target", "-t", help="A target, or an architecture: sm_90.")
    ] = "auto",
    everything: Annotated[
        bool, typer.Option("--all", help="For every architecture of the manifest.")
    ] = False,
    show: Annotated[str, typer.Option("--show", help="Print the code of one kernel.")] = "",
    as_: Annotated[str, typer.Option("--as", help="With --show: source, ptx or sass.")] = "source",
    family: Annotated[str, typer.Option("--family", help="Only this family.")] = "",
    jobs: Annotated[int, typer.Option("--jobs", help="Compilers at once; 0: one a core.")] = 0,
    recipe: c.Recipe = "auto",
    config: Annotated[
        str, typer.Option("--config", help="A config.json in the place of a model.")
    ] = "",
    dtype: c.Dtype = "bf16",
    path: c.SearchPath = None,
    trust_remote_code: c.Trust = False,
    as_json: c.Json = False,
) -> int:
    """Compile every generated Triton kernel for a GPU, or those that a model needs; no GPU needed.

    `sitsopt kernels smollm2 --target h100`
    """
    from sitsopt.cli.kernels import kernels as verb

    return verb(
        target, model, everything=everything, show=show, as_=as_, family=family, jobs=jobs,
        recipe=recipe, config=config, dtype=dtype, path=path or (), as_json=as_json,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip


def _words(words: list[str] | None, verb: str, most: int) -> tuple[str, str]:
    given = words or []
    if len(given) > (most if given[:1] == ["new"] else 1):
        raise typer.BadParameter(f"{verb} takes one name", param_hint="ID")
    return ([*given, "", ""])[0], ([*given, "", ""])[1]


def _needs(word: str, usage: str) -> None:
    if not word:
        raise typer.BadParameter(f"sitsopt {usage}: the last word is missing", param_hint="ID")
