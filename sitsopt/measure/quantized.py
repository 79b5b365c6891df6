"""A Hugging Face folder whose weights are quantized, as a plain model that knows where its weights come from.

Weights are read by `runtime/archive/folder.py`, so that no package of the quantizer's is needed. The model computes with
the dequantized weights; `--recipe auto,stored` packs the folder's own numbers. What a folder says about rounding
activations is not applied.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sitsopt.graph.archived import Archive, Archived, comes_from
from sitsopt.measure.errors import InputError
from sitsopt.runtime.archive.folder import PARTS, Tensors, archived, quantized_layers

METHODS = ("compressed-tensors", "gptq", "awq", "fp8", "raw")


def settings_of(config: Any) -> dict[str, Any] | None:
    """The config's `quantization_config`, where its method is one that is read here."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    as_dict: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    return as_dict if str(as_dict.get("quant_method")) in METHODS else None


def load_quantized(
    folder: Path, kind: Any, config: Any, settings: Mapping[str, Any], dtype: torch.dtype
) -> nn.Module:
    """A model of class `kind` in `dtype`. Raises InputError for what has no packed form."""
    tensors = Tensors(folder)
    entries = {
        f"{layer}.weight": archived(tensors, layer, settings, folder.name)
        for layer in quantized_layers(tensors)
    }
    for entry in entries.values():
        if isinstance(entry, str):
            raise InputError(f"{folder} cannot be loaded: {entry}")
    plain = copy.deepcopy(config)
    del plain.quantization_config
    model, info = kind.from_pretrained(
        None, config=plain, state_dict=_plain(tensors, entries, dtype), dtype=dtype,
        output_loading_info=True,
    )  # fmt: skip
    if info["missing_keys"]:
        raise InputError(
            f"{folder} holds no weights for {', '.join(sorted(info['missing_keys'])[:3])}"
        )
    comes_from(model, lambda _: entries)
    loaded: nn.Module = model
    return loaded


def _plain(tensors: Tensors, entries: Archive, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight as the model's dtype has it."""
    state = {
        name: entry.values(0, entry.shape[0]).to(dtype)
        for name, entry in entries.items()
        if isinstance(entry, Archived)
    }
    for name in tensors:
        if name not in state and name.rpartition(".")[2] not in PARTS:
            value = tensors[name]
            state[name] = value.to(dtype) if value.is_floating_point() else value
    return state
