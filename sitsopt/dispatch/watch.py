"""Whether a model is still the one that was compiled: its weights, modes, modules, hooks and settings.

Between calls two things are compared: the stamps of every dict and class the model's description was read from, and the
addresses of its tensors (`.data =` and `.to()` move a tensor and touch no dict). Only if one of them moved is the
model described again. What no dict shows, a list changed in place, goes unnoticed until something else changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _globals

from .describe import Describer
from .versions import Versions

RESTLESS = 16  # descriptions in a row that a model needs before it is said never to be still


class Watch:
    """One model. `turn` counts its changes; `digest` describes it as it is now, `scopes` are the globals that a trace has
    read, `tensors` its parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.turn = 0
        self.digest = ""
        self.scopes: list[dict[str, Any]] = []
        self.row = 0
        self._look()

    def still(self) -> bool:
        """Whether nothing moved since the last look; one look more if something did. Raises Opaque."""
        if not self._versions.changed() and [*map(ADDRESS, self.tensors)] == self._addresses:
            self.row = 0
            return True
        self._look()
        self.row += 1
        return False

    @property
    def restless(self) -> bool:
        """Whether the model changes at every call, so that watching it costs more than it saves."""
        return self.row >= RESTLESS

    def also(self, scopes: Iterable[dict[str, Any]]) -> None:
        """Watch these dicts too: globals whose names a trace has read."""
        new = [s for s in scopes if not any(s is known for known in self.scopes)]
        if new:
            self.scopes.extend(new)
            self._stamp()

    def _look(self) -> None:
        describer = Describer()
        self.digest = describer.digest([self.model, HOOKS])
        self._dicts, self._types = describer.dicts, describer.types
        self.tensors = [*_tensors(self.model)]
        self._addresses = [*map(ADDRESS, self.tensors)]
        self.turn += 1
        self._stamp()

    def _stamp(self) -> None:
        self._versions = Versions([*self._dicts, *self.scopes], self._types)


ADDRESS = torch.Tensor.data_ptr
HOOKS = [
    value
    for name, value in vars(_globals).items()
    if name.startswith("_global_") and isinstance(value, dict)
]


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, and those a `__dict__` holds beside them, each once."""
    found = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                found[id(value)] = value
    return [*found.values()]
