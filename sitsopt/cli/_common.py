"""What every verb shares: options, errors as exit codes, progress, plain output into pipes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sitsopt.measure.engines import SitsOptions

Model = Annotated[
    str,
    typer.Argument(
        help="A Hugging Face folder, a .gguf file, module:factory, or a sample's name (smollm2).",
        show_default=False,
    ),
]
Recipe = Annotated[
    str, typer.Option("--recipe", "-r", help="Recipes, separated by commas, later ones on top.")
]
Target = Annotated[str, typer.Option("--target", "-t", help="The machine; see `sitsopt targets`.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="PATH=VALUE: override one value of the recipe.", show_default=False),
]
SearchPath = Annotated[
    list[Path] | None,
    typer.Option("--path", help="A folder with rules, recipes or targets.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code from the model's folder, or a pickle.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A tenth of the work, for a first look.")]

Dtype = Annotated[str, typer.Option("--dtype", help="bf16, f16, f32 or f64.")]
New = Annotated[int, typer.Option("--new", help="Tokens to generate.")]
Within = Annotated[
    float | None,
    typer.Option(
        "--ppl-within",
        help="Let perplexity alone decide, within this many percent: for recipes that quantize.",
        show_default=False,
    ),
]


# Options of the backend that no verb offers; tests turn Inductor off here.
EXTRA: dict[str, Any] = {}


@dataclass(frozen=True)
class ModelOptions:
    """The options that every verb with a MODEL takes, as the verbs get them."""

    model: str
    recipe: str = "auto"
    target: str = "auto"
    set: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    dtype: str = "bf16"
    trust: bool = False

    def sits(self) -> SitsOptions:
        """As options of the backend, checked before a model is loaded: a typo must not cost a minute."""
        from sitsopt.measure.engines import SitsOptions
        from sitsopt.options import Options

        found = SitsOptions(self.recipe, self.target, self.set, self.path, dict(EXTRA))
        Options.parse(found.as_options())
        return found


def listed(value: Sequence[Any] | None) -> tuple[str, ...]:
    """An option that may be given several times, as text."""
    return tuple(str(one) for one in value or ())


def split(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def emit(data: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(data, indent=2, default=str))


def tell_error(error: BaseException, as_json: bool) -> None:
    """Bad input: its text to stderr, or with --json an object with every mistake to stdout."""
    if not as_json:
        print(error, file=sys.stderr)
        return
    errors = getattr(error, "errors", [error])
    emit(
        {"errors": [e.as_dict() if hasattr(e, "as_dict") else {"problem": str(e)} for e in errors]}
    )


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with what is going on and since when; where there is no terminal, a line a
    step. Also with --json, which has stdout to itself: some steps take minutes."""
    if not sys.stderr.isatty():
        yield lambda text: print(f"  {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def say(text: str) -> None:
            bar.reset(task, description=text)

        yield say


def show(what: Any) -> None:
    """Print a rich object; plain and of a fixed width into a file or a pipe."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(what)
    else:
        Console(highlight=False, color_system=None, width=110).print(what)
