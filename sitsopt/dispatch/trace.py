"""Dynamo's capture of a whole call, outside its own dispatch: guards, byte code and the graph.

All that this package takes from inside torch is here. torch keeps these parts for its ahead-of-time compilation
(`torch._dynamo.aot_compile`, 2.10 and later); where one is missing or moved, `NotWhole` says so and Dynamo's ordinary
dispatch is used.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from .bytecode import without_gathering

Locals = dict[str, Any]
Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


class NotWhole(RuntimeError):
    """The call cannot be captured as one graph, or not by this torch; the text says why."""


@dataclass(frozen=True)
class _Module:
    name: str


@dataclass
class Code:
    """Dynamo's byte code for a call and what it needs: modules by the names it uses, the names of the graph and of
    the dict of builtins, and further globals that Dynamo has put where the forward's own are."""

    code: types.CodeType
    imports: dict[str, str]
    backend_id: str
    builtins_id: str | None = None
    globals: dict[str, Any] = field(default_factory=dict)

    def bind(
        self, forward: types.FunctionType, graph: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """A function with `forward`'s signature and closure that runs `graph`, and one, where it can be had, that calls
        `graph` without arguments."""
        scope = self.scope(forward)
        scope[self.backend_id] = graph
        short = without_gathering(self.code, self.backend_id)
        return _function(self.code, scope, forward), short and _function(short, scope, forward)

    def scope(self, forward: types.FunctionType) -> dict[str, Any]:
        """The globals that byte code and guards read: the forward's own, not a copy, with what Dynamo puts there."""
        own = {self.builtins_id: vars(builtins)} if self.builtins_id else {}
        scope = forward.__globals__
        for name, value in {**self.globals, **self.modules(), **own}.items():
            if name != self.backend_id and scope.setdefault(name, value) is not value:
                raise NotWhole(f"the global {name} is something else here")
        return scope

    def reserve(self) -> None:
        """Keep Dynamo off the numbered names of byte code from another process, whose numbers it gives out again here:
        it insists on names of its own."""
        from torch._dynamo import bytecode_transformation as numbered

        names = [*self.globals, self.builtins_id or ""]
        used = [int(n.rpartition("_")[2]) for n in names if n.rpartition("_")[2].isdigit()]
        counter = getattr(numbered, "_unique_id_counter", None)
        while used and counter is not None and next(counter) < max(used):
            pass

    def __getstate__(self) -> dict[str, Any]:
        """Modules go by name: pickle knows functions and classes only."""
        kept = {
            k: _Module(v.__name__) if isinstance(v, types.ModuleType) else v
            for k, v in self.globals.items()
            if k not in self.imports and k != self.backend_id
        }
        return {**vars(self), "globals": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.globals = {
            k: importlib.import_module(v.name) if isinstance(v, _Module) else v
            for k, v in self.globals.items()
        }

    def modules(self) -> dict[str, Any]:
        """The modules by the aliases the byte code and the guards use."""
        return {alias: importlib.import_module(name) for alias, name in self.imports.items()}


@dataclass
class Traced:
    """One captured call. `left_out` are names (expressions over L and G) whose identity Dynamo would guard and a
    later process cannot: functions, classes and modules that the trace has read."""

    guards: Any
    guards_state: bytes
    code: Code
    compiled: Callable[..., Any]
    left_out: list[str]
    files: frozenset[str]


def _function(
    code: types.CodeType, scope: dict[str, Any], like: types.FunctionType
) -> types.FunctionType:
    made = types.FunctionType(code, scope, closure=like.__closure__, argdefs=like.__defaults__)
    made.__kwdefaults__ = like.__kwdefaults__
    return made


def containers(forward: types.FunctionType) -> list[str]:
    """The locals that hold further arguments: those of `*args` and `**kwargs`."""
    code = forward.__code__
    named = code.co_argcount + code.co_kwonlyargcount
    flags = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    return list(code.co_varnames[named : named + sum(bool(code.co_flags & f) for f in flags)])


class Binder:
    """From the arguments of a call to the local names that guards read."""

    def __init__(self, forward: types.FunctionType) -> None:
        code = forward.__code__
        count = code.co_argcount + code.co_kwonlyargcount
        self.names = code.co_varnames[: code.co_argcount]
        self.known = frozenset(code.co_varnames[code.co_posonlyargcount : count])
        rest = list(code.co_varnames[count:])
        self.star = rest.pop(0) if code.co_flags & inspect.CO_VARARGS else None
        self.stars = rest.pop(0) if code.co_flags & inspect.CO_VARKEYWORDS else None
        signature = inspect.signature(forward, follow_wrapped=False)
        self.defaults = {
            name: p.default
            for name, p in signature.parameters.items()
            if p.default is not inspect.Parameter.empty
        }
        self.closure = list(
            zip(code.co_freevars, forward.__closure__ or (), strict=True)
        )  # cells may be filled anew

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Locals | None:
        """Locals by name; None for arguments that do not fit the signature."""
        found = {**self.defaults, **dict(zip(self.names, args, strict=False))}
        if self.star is not None:
            found[self.star] = args[len(self.names) :]
        elif len(args) > len(self.names):
            return None
        if self.stars is not None:
            extra: dict[str, Any] = {}
            for name, value in kwargs.items():
                (found if name in self.known else extra)[name] = value
            found[self.stars] = extra
        elif self.known.issuperset(kwargs):
            found.update(kwargs)
        else:
            return None
        for name, cell in self.closure:
            found[name] = cell.cell_contents
        return found


def trace(
    forward: types.MethodType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compiler: Compiler,
    dynamic: bool | None,
) -> Traced:
    """Capture `forward(*args, **kwargs)` and compile its graph. Raises NotWhole, and whatever `compiler` raises."""
    try:
        from torch._dynamo.convert_frame import compile_lock, fullgraph_capture
    except ImportError as error:
        raise NotWhole(f"this torch has no whole capture: {error}") from None
    with ExitStack() as stack:
        stack.enter_context(compile_lock)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for context in _contexts(dynamic):
            stack.enter_context(context)
        try:
            captured = fullgraph_capture(forward, args, kwargs)
        except Exception as error:  # a graph break, a call that fails, something moved inside torch
            raise NotWhole(_first_line(error)) from None
        given = captured.backend_input
        if given is None:
            raise NotWhole("the call computes nothing with tensors")
        compiled = _compile(given, compiler)
        try:
            return _with_guards(forward, captured, compiled)
        except Exception as error:
            raise NotWhole(f"its guards cannot be kept: {_first_line(error)}") from None


def _contexts(dynamic: bool | None) -> list[Any]:
    from torch._dynamo.eval_frame import set_enable_dynamic
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr

    contexts: list[Any] = [
        get_metrics_context(),
        dynamo_timed("fullgraph_capture"),
        torch_function_mode_stack_state_mgr,
    ]
    return contexts if dynamic is None else [*contexts, set_enable_dynamic(dynamic)]


def _compile(given: Any, compiler: Compiler) -> Callable[..., Any]:
    context = torch._guards.TracingContext(given.fake_mode)
    context.tensor_to_context = given.tensor_to_context
    with torch._guards.tracing(context), torch._functorch.config.patch(BUNDLED):
        return compiler(given.graph_module, given.example_inputs)


# AOTAutograd keeps with its result what it takes to write it out; the key is ours
BUNDLED = {
    "bypass_autograd_cache_key": True,
    "bundled_autograd_cache": True,
    "force_autograd_cache": True,
}


def _with_guards(forward: types.MethodType, captured: Any, compiled: Callable[..., Any]) -> Traced:
    from torch._dynamo.hooks import Hooks

    output = captured.graph_capture_output
    left_out: list[str] = []
    state = output.output_graph
    cells = forward.__code__.co_freevars
    hooks = Hooks(guard_filter_fn=lambda entries: _kept(entries, cells, left_out))
    checked = output.build_guards(forward.__code__, hooks=hooks, save=True, strict_error=True)
    environment = output.get_runtime_env()
    files = frozenset(code.co_filename for code in (forward.__code__, *output.traced_code))
    # Python's own modules have no file here; a dataclass's methods have none, and its class is among the names
    files = frozenset(f for f in files if not f.startswith(("<frozen ", "<string>")))
    code = Code(
        environment.bytecode, dict(output.import_sources), captured.backend_input.backend_id,
        state.name_of_builtins_dict_key_in_fglobals,
        {n: output.f_globals[n] for n in environment.external_refs if n in output.f_globals},
    )  # fmt: skip
    return Traced(
        checked.guard_manager, checked.guards_state, code, compiled, sorted(set(left_out)), files
    )


def _kept(entries: Sequence[Any], cells: Sequence[str], left_out: list[str]) -> list[bool]:
    """Guards on the model are the watch's work, Python's builtins are what they are; identities of functions and
    classes cannot be written down, nor can what the forward's own closure holds."""
    kept = []
    for entry in entries:
        source = entry.orig_guard.originating_source
        name, home = (getattr(_root(source), part, "") for part in ("local_name", "global_name"))
        identity = {entry.guard_type, *entry.derived_guard_types} & IDENTITIES
        if _of_model(source) or home.startswith("__builtins_dict__"):
            kept.append(False)
        elif name in cells:
            left_out.append(f"L[{name!r}]")
            kept.append(False)
        else:
            if identity:
                left_out.append(entry.name)
            kept.append(not identity)
    return kept


def _root(source: Any) -> Any:
    while getattr(source, "base", None) is not None:
        source = source.base
    return source


def _of_model(source: Any) -> bool:
    """Whether a guarded value is reached through a module: its attributes, its class, their attributes."""
    while source is not None:
        if source.guard_source.is_unspecialized_nn_module():
            return True
        source = getattr(source, "base", None)
    return False


IDENTITIES = {
    "DICT_VERSION", "NN_MODULE", "ID_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "CLOSURE_MATCH",
    "WEAKREF_ALIVE",
}  # fmt: skip


def load_guards(state: bytes, code: types.CodeType, scope: dict[str, Any]) -> Any:
    """Guards from bytes, for calls whose globals are `scope`."""
    from torch._dynamo.convert_frame import get_compile_id
    from torch._dynamo.package import load_guard_manager, load_guards_state
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._guards import CompileContext, compile_context

    with (
        compile_context(CompileContext(get_compile_id({}))),
        get_metrics_context(),
        dynamo_timed("load_guards"),
    ):
        loaded = load_guards_state(state)
        order = (
            loaded.output_graph.guard_on_key_order
        )  # of dicts in the model too, which are not kept
        loaded.output_graph.guard_on_key_order = {s for s in order if not _of_model(s)}
        return load_guard_manager(loaded, code, scope)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
