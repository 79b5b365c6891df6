"""`sitsopt explain MODEL`: what is rewritten, what almost is and why not, what the settings come to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..spec.errors import Pos, SpecError, did_you_mean
from ..spec.locate import files
from ._common import emit, progress, show, split


def explain(
    model: str = "",
    *,
    recipe: str = "auto",
    target: str = "auto",
    overrides: Sequence[str] = (),
    config: str = "",
    dtype: str = "bf16",
    graphs: str = "",
    html: str = "",
    why_not: str = "",
    as_json: bool = False,
    path: Sequence[str | Path] = (),
    trust_remote_code: bool = False,
) -> int:
    """Trace a decode step and a prefill (or one forward) and tell what the rules do to them; nothing is compiled.

    Exit status: 0 fine, 1 the recipe expects a rule to fire more or less often than it did, 2 bad input.
    """
    from ..measure.explain import explain as run
    from ..measure.models import load
    from ..options import Options

    if why_not:
        _check_rule(why_not, path)
    if html:
        _check_page(Path(html))
    options = Options.parse(
        {
            "recipe": recipe,
            "target": target,
            "set": list(overrides),
            "path": list(path),
            "explain": True,
        }
    )
    with progress() as say:
        say("loading the model")
        loaded = load(model or None, dtype, trust_remote_code, config=config or None)
        report, unmet = run(loaded.model, options, split(graphs), loaded.inputs, say)
    if html:
        Path(html).write_text(report.html(), encoding="utf-8")
    if as_json:
        emit({**_data(report, why_not), "unmet": str(unmet) if unmet else None})
    else:
        _print(report.why_not(why_not) if why_not else report)
        if html:
            print(f"\nwritten to {html}")
    if unmet is not None:
        print(f"\nthe recipe's `expect` is not met:\n{unmet}", file=sys.stderr)
    return 0 if unmet is None else 1


def _check_rule(name: str, path: Sequence[str | Path]) -> None:
    """Before a model is loaded: a typo must not cost a minute."""
    known = sorted(files("rules", path))
    if name not in known:
        expected = "one of " + ", ".join(known)
        hint = did_you_mean(name, known)
        raise SpecError(
            Pos("--why-not"), f"there is no rule `{name}`", expected=expected, hint=hint
        )


def _check_page(file: Path) -> None:
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise SpecError(
            Pos("--html"), f"cannot write {file}", expected="a file in a folder that exists"
        )


def _data(report: Any, rule: str) -> dict[str, Any]:
    data: dict[str, Any] = report.json()
    if rule:
        data["rules"] = [r for r in data["rules"] if r["id"] == rule]
        data["why_not"] = report.why_not(rule).json()
    return data


def _print(what: Any) -> None:
    """In colour and as wide as the terminal; plain and of a fixed width into a file or a pipe."""
    if sys.stdout.isatty():
        show(what)
    else:
        print(what)
