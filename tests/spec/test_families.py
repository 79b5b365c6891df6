"""The names that `emit:` takes are those of the kernels that `sitsopt/emit` describes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import sitsopt.emit
from sitsopt.spec.families import kernel_families


def test_families_are_those_that_are_described() -> None:
    names = [m.name for m in pkgutil.iter_modules(sitsopt.emit.__path__, "sitsopt.emit.")]
    described = {
        value.family
        for module in map(importlib.import_module, names)
        for _, value in inspect.getmembers(module, inspect.isclass)
        if isinstance(getattr(value, "family", None), str) and value.__module__ == module.__name__
    }
    on_cpu = {"linear", "packed", "kv_attention"}  # matmul and attention as the CPU knows them
    assert described - on_cpu == set(kernel_families())
