"""Whether a model is still the one that was compiled: its weights, modes, modules, hooks and settings.

Between calls two things are compared: every dict, class, list and set that the model's description was read from, and
the addresses and sizes of its tensors (`.data =` and `.to()` move a tensor and touch no dict). Only if one of them
changed is the model described again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as _globals

from ..graph.released import Released
from ..runtime.noted import moved
from .describe import Describer
from .versions import Versions

RESTLESS = 16  # descriptions in a row that a model needs before it is said never to be still


class Watch:
    """One model. `turn` counts its changes; `digest` describes it as it is now, `scopes` are the globals that a trace has
    read, `tensors` all tensors it holds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.turn = 0
        self.digest = ""
        self.scopes: list[dict[str, Any]] = []
        self.row = 0
        self._look()

    def still(self) -> bool:
        """Whether nothing moved since the last look; one look more if something did. Raises Opaque."""
        if not self._versions.changed() and not self._moved():
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
        self.still()
        self.scopes += [s for s in scopes if not any(s is known for known in self.scopes)]
        self._stamp()

    def _look(self) -> None:
        describer = Describer()
        self.digest = describer.digest([self.model, HOOKS])
        self._read = describer
        self.tensors = describer.tensors
        self.turn += 1
        self._stamp()

    def _stamp(self) -> None:
        read = self._read
        self._versions = Versions([*read.dicts, *self.scopes], read.types, read.lists, read.sets)
        self._moved = moved([t for t in self.tensors if type(t) is not Released])


HOOKS = [
    value
    for name, value in vars(_globals).items()
    if name.startswith("_global_") and isinstance(value, dict)
]
