"""The families of kernels that a rule's `emit:` may name, read from `kernel_families.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from .source import read


@cache
def kernel_families() -> dict[str, str]:
    """Family to what its kernels do, in one sentence."""
    found: dict[str, str] = read(Path(__file__).with_name("kernel_families.yaml")).data
    return found
