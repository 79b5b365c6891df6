"""A declarative graph-rewrite backend for torch.compile."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .graph.released import restore
    from .pipeline import LoweringError
    from .planning import ExpectationError
    from .reporting import Report, report
    from .runtime.kv.cache import QuantizedKVCache
    from .whole import optimize

__all__ = [
    "ExpectationError",
    "LoweringError",
    "QuantizedKVCache",
    "Report",
    "optimize",
    "report",
    "restore",
]

# Public names and their modules, loaded on first use: `import sitsopt` loads no torch.
_HOMES = {
    "ExpectationError": "planning",
    "LoweringError": "pipeline",
    "QuantizedKVCache": "runtime.kv.cache",
    "Report": "reporting",
    "optimize": "whole",
    "report": "reporting",
    "restore": "graph.released",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
