"""A `.gguf` file as a Hugging Face folder: dequantized once per dtype, kept in the cache.

Unpacking takes 15 s for 135 M parameters (most of it the vocabulary), loading the copy 0.4 s. The
copy is in the dtype that is asked for, so that loading it maps the file and converts nothing: a
second copy in memory would hide every difference in peak memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sitsopt.graph.archived import Archive, Archived, Opener
from sitsopt.measure.cachedir import cache_dir, replace_file, replace_folder
from sitsopt.measure.errors import InputError
from sitsopt.runtime.archive.gguf import archived

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


def archive(path: Path) -> Opener:
    """What a model's `graph.archived.comes_from` is given: the file's quantized weights as they are."""

    def opened(model: nn.Module) -> Archive:
        from transformers import modeling_gguf_pytorch_utils as reader

        config: Any = model.config
        kind = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
        processor = reader.TENSOR_PROCESSORS.get(kind, reader.TensorProcessor)(config.to_dict())
        found: dict[str, Archived | str] = {}
        for name, own, form, offset, shape in _index(path, model, processor):
            rows = _order(processor, own, shape[0])
            data = np.memmap(path, np.uint8, "r", offset, shape)
            taken = rows if isinstance(rows, str) else archived(own, form, data, path.name, rows)
            found[name] = taken
        return found

    return opened


Entry = tuple[str, str, str, int, tuple[int, ...]]


def _index(path: Path, model: nn.Module, processor: Any) -> list[Entry]:
    """Of each quantized matrix the parameter's name, its own, format, offset and shape in bytes. Kept in the cache:
    the reader takes seconds for the vocabulary, and so do the names."""
    import transformers

    key = f"{FORMAT} {transformers.__version__} {type(model).__name__}"
    whose = f"{_digest(path)}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    target = cache_dir("models") / f"{path.stem}-{whose}.index.json"
    try:
        kept = json.loads(target.read_text())
        return [(str(p), str(n), str(k), int(at), tuple(s)) for p, n, k, at, s in kept]
    except (OSError, ValueError, TypeError):
        found = _read_index(path, model, processor)
        with replace_file(target) as part:
            part.write_text(json.dumps(found))
        return found


def _read_index(path: Path, model: nn.Module, processor: Any) -> list[Entry]:
    from gguf import GGUFReader
    from transformers import modeling_gguf_pytorch_utils as reader

    names = reader.get_gguf_hf_weights_map(model, processor)
    return [
        (
            names[t.name],
            t.name,
            t.tensor_type.name,
            int(t.data_offset),
            tuple(map(int, t.data.shape)),
        )
        for t in GGUFReader(path).tensors
        if t.name in names and t.data.dtype == np.uint8 and len(t.data.shape) == 2
    ]


def _order(processor: Any, name: str, rows: int) -> Tensor | None | str:
    """Which of a file's rows each row of the model is; None where they are the same. Rows that hold their own
    numbers go through what transformers does to the file's weights."""
    numbers = np.arange(rows, dtype=np.float64)[:, None]
    made = processor.process(
        numbers, name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
    ).weights
    if made.shape != numbers.shape or not np.array_equal(np.sort(made, 0), numbers):
        return f"transformers changes {name} at loading"
    order = torch.from_numpy(made[:, 0].astype(np.int64))
    return None if np.array_equal(made, numbers) else order


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
