"""Inductor's list of vector instruction sets, without asking the compiler again.

Inductor builds and loads a probe for each set at its first use in a process, for a second or more. A graph from disk
was compiled on this very machine: the sets that worked then stand in while it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any


def imported() -> None:
    """Import what `working` needs. A thread that asks it beside one that traces must not import torch's modules: of two
    threads that import what imports each other, one may see a module half made."""
    with suppress(ImportError):
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401
        from torch.utils import _filelock, cpp_extension  # noqa: F401


def working() -> list[str] | None:
    """The sets that Inductor's probes found to work; None where this torch keeps no such list."""
    try:
        from torch._inductor import cpu_vec_isa
    except ImportError:
        return None
    known = getattr(cpu_vec_isa, "valid_vec_isa_list", None)
    return None if known is None else [str(isa) for isa in known()]


@contextmanager
def taken_as_working(names: Sequence[str] | None) -> Iterator[None]:
    """While this runs, Inductor takes these sets as those that work. None changes nothing."""
    from torch._inductor import cpu_vec_isa

    module: Any = cpu_vec_isa
    supported = {str(isa): isa for isa in getattr(module, "supported_vec_isa_list", ())}
    if names is None or not supported.keys() >= set(names):
        yield
        return
    probed, found = module.valid_vec_isa_list, [supported[name] for name in names]
    module.valid_vec_isa_list = lambda: found
    try:
        yield
    finally:
        module.valid_vec_isa_list = probed
