"""Engines by name: `eager`, `inductor`, `sits`, `sits:RECIPE` - each at its best honest setting.

Inductor's settings were tried on SmolLM2-135M, bf16, two cores, at 512 tokens of context
(tokens/s of decode, seconds to compile): default 24.3 / 88, guards on modules off 25.3 / 85,
freezing 22.3 / 112, cpp_wrapper 26.0 / 342, max-autotune with freezing 22.6 / 120. So a CPU gets
the default with module guards off; the compile time of cpp_wrapper buys nothing that can be told
from noise. A GPU gets CUDA graphs and coordinate descent, the usual choice for single-stream decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sitsopt.dispatch.dispatcher import Dispatcher
from sitsopt.measure.decode import Decoder, Run, slides
from sitsopt.measure.errors import InputError
from sitsopt.measure.looped import Looped
from sitsopt.measure.models import Loaded
from sitsopt.spec.recipe_form import KVCache
from sitsopt.whole import compiled_call

TORCH = ("eager", "inductor", "sits")
CHILDREN = ("llama.cpp",)


@dataclass(frozen=True)
class SitsOptions:
    """What the command line says about the backend; `as_options` is what torch.compile gets."""

    recipe: str = "auto"
    target: str = "auto"
    set: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def as_options(self) -> dict[str, Any]:
        """Only what differs from the backend's own defaults."""
        given: dict[str, Any] = {"recipe": self.recipe}
        if self.target != "auto":
            given["target"] = self.target
        if self.set:
            given["set"] = list(self.set)
        if self.path:
            given["path"] = list(self.path)
        return given | self.extra


def check_names(names: Sequence[str]) -> None:
    """Raise for an engine that is not known, naming those that are."""
    for name in names:
        if name.split(":")[0] not in (*TORCH, *CHILDREN):
            known = ", ".join((*TORCH, "sits:RECIPE", *CHILDREN))
            raise InputError(f"unknown engine `{name}`: one of {known}")


@dataclass
class TorchEngine:
    """One torch engine on one model. `settings` goes into the result."""

    name: str
    decoder: Decoder
    settings: str

    def run(self, ids: torch.Tensor, new: int) -> Run:
        """Prefill and decode once."""
        return self.decoder.run(ids, new)

    def told(self) -> dict[str, Any]:
        """Which loop decodes, where there is a choice."""
        return self.decoder.told() if isinstance(self.decoder, Looped) else {}

    def close(self) -> None:
        """Nothing to end: the engine lives in this process."""


def torch_engine(
    name: str, loaded: Loaded, max_len: int, sits: SitsOptions | None = None
) -> TorchEngine:
    """Prepare `name` on a loaded model; it compiles at its first run."""
    call, settings = compiled(name, loaded, sits or SitsOptions())
    decoder = decoder_of(loaded, call, max_len)
    return TorchEngine(name, decoder, settings)


def decoder_of(
    loaded: Loaded, call: Callable[..., Any], max_len: int, kv: KVCache | None = None
) -> Decoder:
    """What decodes with a compiled call: the loop of `generate()` for our own, else plainly."""
    made = Looped if isinstance(call, Dispatcher) else Decoder
    return made(loaded.model, call, max_len, kv)


def compiled(
    name: str, loaded: Loaded, sits_options: SitsOptions
) -> tuple[Callable[..., Any], str]:
    """The callable that `name` means for this model, and its settings in words."""
    kind, _, recipe = name.partition(":")
    model = loaded.model
    dynamic = None if slides(model) else False
    if kind == "eager":
        return model, "the model as it is"
    if kind == "inductor":
        options = inductor_options(loaded.device.type)
        call = torch.compile(model, dynamic=dynamic, options=options)
        return call, _words(options)
    given = sits_options.as_options() | ({"recipe": recipe} if recipe else {})
    call = compiled_call(model, given, dynamic, speculates=True)
    return call, _shown(given) or "as it comes"


def skip_module_guards(guards: Sequence[Any]) -> Sequence[bool]:
    """Guards on modules and their parameters cost 0.3 ms a token; nothing changes a module here."""
    return torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)


def inductor_options(device: str) -> dict[str, Any]:
    """Inductor's best honest settings for single-stream decoding."""
    options: dict[str, Any] = {"guard_filter_fn": skip_module_guards}
    if device == "cuda":
        options |= {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
    return options


def _words(options: dict[str, Any]) -> str:
    shown = {k: v for k, v in options.items() if k != "guard_filter_fn"}
    return ", ".join(filter(None, [_shown(shown), "module guards off"]))


def _shown(options: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in options.items())
