"""A value as text that is the same in every process: what a trace may have read of it, and no identities.

Tensors are described by shape, strides, dtype, device and `requires_grad`, never by their contents; objects by
their class and attributes; functions by their code. What cannot be described raises `Opaque`.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from ..graph.released import Released

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...))
TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
DEEPEST = 24


class Opaque(TypeError):
    """A value that has no description: it must not become part of a key."""


class Describer:
    """Describes values one after another; what was described once is referred to by its number. `dicts`, `lists` and
    `sets` are all of these that were read, `types` all classes of modules and objects, `tensors` all tensors, `slotted` objects
    whose attributes lie in slots: a change of the description shows in one of them."""

    def __init__(self) -> None:
        self.dicts: list[dict[Any, Any]] = []
        self.lists: list[list[Any]] = []
        self.sets: list[set[Any]] = []
        self.types: list[type] = []
        self.tensors: list[torch.Tensor] = []
        self.slotted: list[Any] = []
        self._seen: dict[int, int] = {}
        self._keep: list[Any] = []  # so that no id comes back as another object
        self._parts: list[str] = []

    def digest(self, value: Any) -> str:
        """SHA-256 over everything described so far and `value`. Raises Opaque."""
        self._parts.extend(self._walk(value, 0))
        return hashlib.sha256("\0".join(self._parts).encode()).hexdigest()

    def _walk(self, value: Any, depth: int) -> Iterator[str]:
        kind = type(value)
        if isinstance(value, PLAIN) and not isinstance(value, enum.Enum):
            yield f"{kind.__name__}:{value!r}"
            return
        if isinstance(value, TORCH):
            yield repr(value)
            return
        number = self._seen.get(id(value))
        if number is not None:
            yield f"again {number}"
            return
        if depth > DEEPEST:
            raise Opaque("a value is nested too deeply")
        self._seen[id(value)] = len(self._seen)
        self._keep.append(value)
        yield from self._compound(value, depth + 1)

    def _compound(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            yield tensor_facts(value)
        elif isinstance(value, nn.Module):
            yield from self._module(value, depth)
        elif isinstance(value, enum.Enum):
            yield f"{_class(type(value))}.{value.name}"
        elif isinstance(value, type):
            yield f"class {_class(value)} {methods_digest(value)}"
        elif isinstance(value, types.ModuleType):
            yield f"module {value.__name__}"
        elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
            yield from self._container(value, depth)
        elif isinstance(value, PurePath):
            yield f"path {value}"
        elif callable(value) and not hasattr(type(value), "forward"):
            yield from self._callable(value, depth)
        else:
            yield from self._object(value, depth)

    def _module(self, module: nn.Module, depth: int) -> Iterator[str]:
        """All attributes: parameters, buffers, hooks and submodules are dicts among them."""
        yield from self._methods(type(module))
        attributes = {k: v for k, v in module.__dict__.items() if k not in IGNORED}
        self.dicts.append(module.__dict__)
        yield from self._items(attributes.items(), depth)

    def _methods(self, kind: type) -> Iterator[str]:
        """A module's class and those it derives from, by their code: someone may put another method in."""
        yield f"module {_class(kind)}"
        if kind not in self.types:
            self.types.append(kind)
            for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
                yield methods_digest(each)

    def _container(self, value: Any, depth: int) -> Iterator[str]:
        yield f"{_class(type(value))} {len(value)}"
        if isinstance(value, Mapping):
            if isinstance(value, dict):
                self.dicts.append(value)
            yield from self._items(value.items(), depth)
        elif isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self.sets.append(value)
            yield from sorted("/".join(Describer()._walk(v, depth)) for v in value)
        else:
            if isinstance(value, list):
                self.lists.append(value)
            for item in value:
                yield from self._walk(item, depth)
        if getattr(value, "__dict__", None):  # a subclass may carry more
            self.dicts.append(vars(value))
            yield from self._items(vars(value).items(), depth)

    def _items(self, items: Iterable[tuple[Any, Any]], depth: int) -> Iterator[str]:
        for key, item in items:
            yield from self._walk(key, depth)
            yield from self._walk(item, depth)

    def _callable(self, value: Any, depth: int) -> Iterator[str]:
        function = getattr(value, "__func__", value)
        if isinstance(function, functools.partial):
            yield "partial"
            for part in (function.func, function.args, function.keywords):
                yield from self._walk(part, depth)
        elif isinstance(function, types.FunctionType):
            yield f"def {function.__module__}.{function.__qualname__} {code_digest(function.__code__)}"
            for cell in function.__closure__ or ():
                yield from self._walk(_cell_content(cell), depth)
            yield from self._walk(function.__defaults__, depth)
        elif getattr(function, "__module__", None) and hasattr(function, "__qualname__"):
            yield f"builtin {function.__module__}.{function.__qualname__}"
        elif hasattr(function, "__name__"):
            yield f"builtin {getattr(function, '__objclass__', '')}.{function.__name__}"
        else:
            yield from self._object(value, depth)
        if hasattr(value, "__self__") and not isinstance(value.__self__, types.ModuleType):
            yield from self._walk(value.__self__, depth)

    def _object(self, value: Any, depth: int) -> Iterator[str]:
        attributes = getattr(value, "__dict__", None)
        slots = [s for c in type(value).__mro__ for s in getattr(c, "__slots__", ())]
        if not isinstance(attributes, dict) and not slots:
            raise Opaque(f"a {_class(type(value))} cannot be described")
        yield f"object {_class(type(value))}"
        if type(value) not in self.types:
            self.types.append(type(value))
        if isinstance(attributes, dict):
            self.dicts.append(attributes)
            yield from self._items(attributes.items(), depth)
        if slots:
            self.slotted.append(value)
        for slot in slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                yield from self._walk(getattr(value, slot), depth)


def program(value: Any) -> str:
    """A function, class or module as text: its name and its code, with that of the functions it closes over. What
    else it holds is not part of the program."""
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        inner = [_cell_content(cell) for cell in function.__closure__ or ()]
        codes = [
            code_digest(f.__code__) for f in (function, *inner) if isinstance(f, types.FunctionType)
        ]
        return f"def {function.__module__}.{function.__qualname__} {codes}"
    if isinstance(value, type):
        return f"class {_class(value)} {methods_digest(value)}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    name = getattr(function, "__qualname__", getattr(function, "__name__", ""))
    return f"{_class(type(value))} {name}"


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


# What no call reads: how a module is called (the compiled call must not change its own key), loading and saving,
# and what goes with the hooks that are read.
IGNORED = frozenset({
    "_previous_max_cache_length",  # generate() writes there how long its last static cache was
    "_compiled_call_impl", "generation_config", "_non_persistent_buffers_set", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_is_full_backward_hook",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
})  # fmt: skip


def tensor_facts(tensor: torch.Tensor) -> str:
    """What Dynamo guards of a tensor: class, shape, strides, dtype, device, whether it asks for gradients."""
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    kind = nn.Parameter if type(tensor) is Released else type(tensor)
    return (
        f"{_class(kind)} {tuple(tensor.shape)} {strides} {tensor.dtype} {tensor.device}"
        f" {tensor.requires_grad}"
    )


@functools.lru_cache(maxsize=1 << 14)
def code_digest(code: types.CodeType) -> str:
    """SHA-256 of what a function does: byte code, names and constants, nested functions too."""
    parts = [code.co_code.hex(), repr(code.co_names), repr(code.co_varnames)]
    for constant in code.co_consts:
        nested = isinstance(constant, types.CodeType)
        parts.append(code_digest(constant) if nested else _constant(constant))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def methods_digest(kind: type) -> str:
    """SHA-256 over the code of the functions a class defines itself, a dataclass's generated ones included."""
    found = {
        name: code_digest(inspect.unwrap(value).__code__)
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType)
        and isinstance(inspect.unwrap(value), types.FunctionType)
    }
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
