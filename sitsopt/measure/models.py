"""MODEL on the command line: a Hugging Face folder, a `.gguf` file, `module:factory`, the name of a
packaged sample, or a config alone (meta tensors, no weights)."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sitsopt.graph.archived import comes_from
from sitsopt.measure.errors import InputError
from sitsopt.measure.gguf import archive, unpacked
from sitsopt.measure.packaged import PACKAGED, find_packaged
from sitsopt.measure.quantized import load_quantized, settings_of
from sitsopt.spec.errors import did_you_mean

DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("f16", "float16", "half"), torch.float16),
    **dict.fromkeys(("f32", "float32"), torch.float32),
    **dict.fromkeys(("f64", "float64"), torch.float64),
}
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass
class Loaded:
    """A model ready to run. `kind` is folder, gguf, factory or config; a config has no weights."""

    model: nn.Module
    tokenizer: Any | None
    name: str
    config: Any | None
    kind: str
    folder: Path | None = None  # where the weights were read from
    gguf: Path | None = None  # the file that other runtimes can read
    inputs: Any = None  # example inputs, when a factory gave them

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return next((p.dtype for p in self.model.parameters()), torch.float32)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype called `name` (bf16, f16, f32 or f64)."""
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise InputError(f"unknown dtype `{name}`: one of bf16, f16, f32, f64")
    return DTYPES[name]


def default_device() -> torch.device:
    """The GPU when there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(
    spec: str | None,
    dtype: str | torch.dtype = "bf16",
    trust_remote_code: bool = False,
    config: str | Path | None = None,
    device: torch.device | str | None = None,
) -> Loaded:
    """Load what MODEL names, in eval mode. Raises `InputError` with one sentence when it cannot."""
    wanted = dtype_of(dtype)
    if config is not None:
        return _from_config(Path(config), wanted)
    if not spec:
        raise InputError(f"name a model: {_choices()}")
    loaded = _load(spec, wanted, trust_remote_code)
    loaded.model.eval().requires_grad_(False)
    loaded.model.to(default_device() if device is None else torch.device(device))
    return loaded


def _load(spec: str, dtype: torch.dtype, trust: bool) -> Loaded:
    path = Path(spec).expanduser()
    if spec in PACKAGED:
        return _from_gguf(find_packaged(spec), spec, dtype)
    if path.is_dir():
        return _from_folder(path, path.resolve().name, dtype, trust)
    if path.is_file():
        if path.suffix == ".gguf":
            return _from_gguf(path, path.stem, dtype)
        if path.suffix == ".json":
            raise InputError(f"{path} is a config: give it as --config {path}")
        raise InputError(f"{path} is no model: a file must be .gguf")
    if _FACTORY.fullmatch(spec):
        return _from_factory(spec, dtype)
    hint = did_you_mean(spec, PACKAGED) or f"give {_choices()}; nothing is downloaded"
    raise InputError(f"no model `{spec}`: {hint}")


def _choices() -> str:
    return f"a Hugging Face folder, a .gguf file, module:factory, {' or '.join(PACKAGED)}"


def transformers() -> Any:
    """The transformers package, offline and without progress bars of its own."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        package = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError("transformers is missing: pip install 'sitsopt[models]'") from error
    package.utils.logging.set_verbosity_error()
    package.utils.logging.disable_progress_bar()
    return package


def _from_gguf(path: Path, name: str, dtype: torch.dtype) -> Loaded:
    transformers()
    loaded = _from_folder(unpacked(path, dtype), name, dtype, trust=False)
    loaded.kind, loaded.gguf = "gguf", path
    comes_from(loaded.model, archive(path))
    return loaded


def _from_folder(folder: Path, name: str, dtype: torch.dtype, trust: bool) -> Loaded:
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} holds no config.json: it is no Hugging Face model")
    hf = transformers()
    config = _read_config(folder / "config.json", trust)
    _check_weights(folder, trust)
    safe = {} if trust else {"use_safetensors": True}
    kind = _auto_class(hf, config, trust)
    try:
        if (settings := settings_of(config)) is not None:
            model = load_quantized(folder, kind, config, settings, dtype)
        else:
            model = kind.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=trust, **safe
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(f"{folder} cannot be loaded: {_first_line(error)}") from error
    tokenizer = None
    if any((folder / file).exists() for file in _TOKENIZER_FILES):
        tokenizer = hf.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust
        )
    return Loaded(model, tokenizer, name, model.config, "folder", folder=folder)


def _from_config(path: Path, dtype: torch.dtype) -> Loaded:
    if not path.is_file():
        raise InputError(f"no config file {path}")
    hf = transformers()
    config = _read_config(path, trust=False)
    with torch.device("meta"):
        model = _auto_class(hf, config, trust=False)._from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    name = path.stem if path.stem != "config" else path.resolve().parent.name
    return Loaded(model, None, name, config, "config")


def _read_config(path: Path, trust: bool) -> Any:
    """The configuration in `path`; `auto_map` names code in the folder, which needs trust."""
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise InputError(f"{path} names no model_type: it is no Hugging Face configuration")
    if data.get("auto_map") and not trust:
        raise InputError(f"{path} runs code from its folder: pass --trust-remote-code to allow it")
    hf = transformers()
    try:
        return hf.AutoConfig.from_pretrained(
            path.parent if path.name == "config.json" else path,
            local_files_only=True,
            trust_remote_code=trust,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: {_first_line(error)}") from error


def _check_weights(folder: Path, trust: bool) -> None:
    if list(folder.glob("*.safetensors")):
        return
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if not pickles:
        raise InputError(f"{folder} holds no weights (*.safetensors)")
    if not trust:
        raise InputError(
            f"{pickles[0]} is a pickle, which can run code: pass --trust-remote-code to allow it"
        )


def _auto_class(hf: Any, config: Any, trust: bool) -> Any:
    """The class that the config names; with its own code, the auto class that looks it up."""
    if trust and getattr(config, "auto_map", None):
        return hf.AutoModelForCausalLM
    for name in config.architectures or ():
        if hasattr(hf, name):
            return getattr(hf, name)
    return _class_for(hf.MODEL_FOR_CAUSAL_LM_MAPPING, config) or _class_for(
        hf.MODEL_MAPPING, config, or_raise=True
    )


def _class_for(mapping: Any, config: Any, or_raise: bool = False) -> Any:
    found = mapping.get(type(config), None)
    if found is None and or_raise:
        raise InputError(f"transformers has no model for {type(config).__name__}")
    return found[0] if isinstance(found, tuple | list) else found


def _from_factory(spec: str, dtype: torch.dtype) -> Loaded:
    """Call `module:factory`: it returns a module, or (module, tokenizer or example inputs)."""
    made = _factory(spec)()
    model, extra = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec} returned {type(made).__name__}, not a torch.nn.Module")
    tokenizer = extra if hasattr(extra, "decode") else None
    inputs = extra if tokenizer is None else None
    config = getattr(model, "config", None)
    return Loaded(model.to(dtype), tokenizer, spec, config, "factory", inputs=inputs)


def _factory(spec: str) -> Callable[[], Any]:
    module_name, _, attribute = spec.partition(":")
    # The user names their own code, which lies beside them; last on the path it can hide nothing.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{spec}: {error}") from error
    if not callable(found):
        raise InputError(f"{spec} is not callable")
    return found


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
