"""A `.gguf` file as a Hugging Face folder: dequantized once per dtype, kept in the cache.

Unpacking takes 15 s for 135 M parameters (most of it the vocabulary), loading the copy 0.4 s. The
copy is in the dtype that is asked for, so that loading it maps the file and converts nothing: a
second copy in memory would hide every difference in peak memory.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch

from sitsopt.measure.cachedir import cache_dir, replace_folder
from sitsopt.measure.errors import InputError

HEAD = 1 << 20  # the header and the first tensors tell two files apart, with size and tail
FORMAT = "1"  # raise when what is written into the folder changes


def unpacked(path: Path, dtype: torch.dtype) -> Path:
    """The Hugging Face folder that holds the weights and the tokenizer of `path` in `dtype`."""
    name = f"{path.stem}-{_digest(path)}-{str(dtype).removeprefix('torch.')}"
    target = cache_dir("models") / name
    if not (target / "config.json").exists():
        _check_room(target.parent, path, dtype)
        with replace_folder(target) as part:
            _unpack(path, dtype, part)
    return target


def gguf_config(path: Path) -> object:
    """The model's configuration alone, from the file's header."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def _unpack(path: Path, dtype: torch.dtype, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers import modeling_gguf_pytorch_utils as reader

    # Its bar would be drawn over ours; the variable that turns bars off is read when torch loads.
    reader.tqdm = lambda items, **_: items
    try:
        config = gguf_config(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        tensors = reader.load_gguf_checkpoint(
            str(path), return_tensors=True, model_to_load=model, torch_dtype=dtype
        )["tensors"]
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{path} cannot be read as a GGUF model: {what}") from error
    tensors = {name: value.to(dtype) for name, value in tensors.items()}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, p in model.named_parameters() if p.is_meta]
    if missing:
        raise InputError(f"{path} holds no weights for {', '.join(missing[:3])}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _digest(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(f"{FORMAT}:{size}".encode())
        digest.update(file.read(HEAD))
        file.seek(max(0, size - HEAD))
        digest.update(file.read(HEAD))
    return digest.hexdigest()[:12]


def _check_room(folder: Path, path: Path, dtype: torch.dtype) -> None:
    # Four bits are the least that a weight takes in the file.
    need = path.stat().st_size * 2 * dtype.itemsize
    free = shutil.disk_usage(folder).free
    if need > free:
        raise InputError(
            f"unpacking {path.name} may need {need >> 20} MB in {folder} and {free >> 20} MB are"
            " free: set SITSOPT_CACHE to a larger disk"
        )
