"""What a run of the command line ends with: 0 fine, 1 the check failed, 2 bad input, 130 interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from sitsopt.cli._common import emit, tell_error
from sitsopt.spec.errors import SpecError


def status(app: Callable[..., Any], arguments: list[str]) -> int:
    """Run the command line and return its exit status."""
    as_json = "--json" in arguments
    try:
        result = app(args=arguments, prog_name="sitsopt", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except SpecError as error:
        tell_error(error, as_json)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away; there is nobody to tell
        return 0
    except Exception as error:
        known = _known_status(error, as_json)
        if known is None:
            raise
        return known


def _known_status(error: Any, as_json: bool) -> int | None:
    """The exit status of an error that is the user's to mend; None for a bug, which keeps its trace."""
    if hasattr(error, "exit_code") and hasattr(error, "show"):  # the parser's own errors
        if as_json:
            emit({"errors": [{"problem": error.format_message()}]})
        else:
            error.show()
        return int(error.exit_code)
    kind = type(error).__name__
    if kind not in ("InputError", "ExpectationError", "LoweringError", "ChildFailed"):
        return None
    tell_error(error, as_json)
    return 2 if kind == "InputError" else 1
