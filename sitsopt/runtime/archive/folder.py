"""Folders of safetensors files whose linear layers are quantized: `compressed-tensors`, GPTQ, AWQ and the raw form.

Each is recognised by the names of a layer's tensors:

| form | tensors | a weight is |
|---|---|---|
| compressed-tensors | `weight` (int8 or e4m3), `weight_scale` | q * scale, of the tensor, a row or a block |
| the same, packed | `weight_packed` int32 [N, K / 8 or / 4], `weight_scale`, `weight_shape`, maybe `weight_zero_point` | (q - zero) * scale |
| GPTQ | `qweight` int32 [K / 8 or / 4, N], `qzeros`, `scales` f16 [groups, N], maybe `g_idx` | (q - zero) * scale |
| AWQ | `qweight` int32 [K, N / 8], `qzeros`, `scales` f16 [groups, N] | (q - zero) * scale |
| raw | `raw` uint8 [N, groups, 12 + group / 2]: scale, zero and step as little-endian f32, then nibbles | scale * (zero + step * q) |

A byte of the raw form holds k = 2j in its lower half and k = 2j + 1 in the higher.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...graph.archived import Archived
from ...graph.packed import FP8, Layout
from .numbers import floats, grouped, integers

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the place of column i among the eight nibbles of a word
SUFFIXES = ("weight_packed", "weight_scale", "qweight", "raw")
PARTS = (
    *SUFFIXES, "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "scales", "g_idx", "weight_scale_inv",
    "input_scale", "input_zero_point",
)  # fmt: skip


class Tensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, read from the mapped files when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, "pt")
            self._files.update(dict.fromkeys(file.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def part(self, name: str) -> Any:
        """A tensor to take a slice of; only that is read."""
        return self._files[name].get_slice(name)

    def __iter__(self) -> Any:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def quantized_layers(tensors: Tensors) -> list[str]:
    """The names of the layers whose weights are quantized."""
    ends = tuple(f".{s}" for s in (*SUFFIXES, "weight_scale_inv"))
    return list(dict.fromkeys(n.rpartition(".")[0] for n in tensors if n.endswith(ends)))


def archived(
    tensors: Tensors, layer: str, settings: Mapping[str, Any], file: str
) -> Archived | str:
    """The weight of a layer. settings: the config's `quantization_config`. A text says why it cannot be packed."""
    source = f"{file}: {layer}"
    if f"{layer}.raw" in tensors:
        return _raw(tensors, layer, source)
    if f"{layer}.weight_packed" in tensors:
        return _compressed_packed(tensors, layer, source)
    if f"{layer}.qweight" in tensors:
        awq = settings.get("quant_method") == "awq"
        return (_awq if awq else _gptq)(tensors, layer, settings, source)
    return _compressed(tensors, layer, source)


def _compressed(tensors: Tensors, layer: str, source: str) -> Archived | str:
    weight = tensors.part(f"{layer}.weight")
    shape = tuple(weight.get_shape())
    inverse = f"{layer}.weight_scale_inv"
    scale = tensors[inverse if inverse in tensors else f"{layer}.weight_scale"]
    one = weight[0:1]
    if one.dtype == FP8:
        return floats(shape, lambda i, j: weight[i:j], scale, source)
    if one.dtype != torch.int8:
        return f"{source} is kept in {one.dtype}"
    zero = tensors.get(f"{layer}.weight_zero_point")
    scale = _by_row(scale, shape[0])
    zero = None if zero is None else _by_row(zero, shape[0])
    return integers("int8", shape, lambda i, j: weight[i:j], scale, zero, source)


def _by_row(value: Tensor, rows: int) -> Tensor:
    """One value for all, one a row or one a group, as [N, groups]."""
    return value.reshape(1 if value.numel() == 1 else len(value), -1).expand(rows, -1)


def unpacked_words(words: Tensor, bits: int) -> Tensor:
    """int32 [.., n] as unsigned numbers [.., n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & ((1 << bits) - 1)).flatten(-2)


def _signed(numbers: Tensor, bits: int) -> Tensor:
    """Unsigned numbers as the layout has them: int4 as they are, int8 around zero."""
    return (numbers - 128 if bits == 8 else numbers).to(torch.int8)


def _compressed_packed(tensors: Tensors, layer: str, source: str) -> Archived | str:
    packed = tensors.part(f"{layer}.weight_packed")
    n, k = map(int, tensors[f"{layer}.weight_shape"].tolist())
    bits = {-(-k // 8): 4, -(-k // 4): 8}.get(packed.get_shape()[1])
    if bits is None:
        return f"{source} has neither 4 nor 8 bits"
    if f"{layer}.weight_g_idx" in tensors:
        return f"{source} has its inputs in another order (g_idx)"
    scale = tensors[f"{layer}.weight_scale"]
    zero = tensors.get(f"{layer}.weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:
        zero = _signed(unpacked_words(zero.t().contiguous(), bits).t()[:n], bits)
    elif zero is not None:
        zero = zero + 8 if bits == 4 else zero
    return integers(
        f"int{bits}", (n, k), lambda i, j: _signed(unpacked_words(packed[i:j], bits)[:, :k], bits),
        scale.reshape(n, -1), zero, source,
    )  # fmt: skip


def _gptq(tensors: Tensors, layer: str, settings: Mapping[str, Any], source: str) -> Archived | str:
    bits = int(settings.get("bits", 4))
    if bits not in (4, 8):
        return f"{source} has {bits} bits"
    words, scale = tensors.part(f"{layer}.qweight"), tensors[f"{layer}.scales"].t()
    k, n = words.get_shape()[0] * 32 // bits, words.get_shape()[1]
    order = tensors.get(f"{layer}.g_idx")
    size = -(-k // scale.shape[1])
    if order is not None and not torch.equal(order.long(), torch.arange(k) // size):
        return f"{source} has its inputs in another order (desc_act)"
    later = settings.get("checkpoint_format") == "gptq_v2"  # the first version keeps zero - 1
    zero = unpacked_words(tensors[f"{layer}.qzeros"], bits)[:, :n].t() + (0 if later else 1)
    zero = zero - 128 if bits == 8 else zero

    def rows(start: int, stop: int) -> Tensor:
        return _signed(unpacked_words(words[:, start:stop].t().contiguous(), bits), bits)

    return integers(f"int{bits}", (n, k), rows, scale.contiguous(), zero, source)


def _awq(tensors: Tensors, layer: str, settings: Mapping[str, Any], source: str) -> Archived | str:
    if int(settings.get("bits", settings.get("w_bit", 4))) != 4:
        return f"{source} has other than 4 bits"
    if settings.get("version", "gemm").lower() != "gemm":
        return f"{source} is laid out for {settings['version']}, not gemm"
    words, scale = tensors.part(f"{layer}.qweight"), tensors[f"{layer}.scales"].t().contiguous()
    k, n = words.get_shape()[0], words.get_shape()[1] * 8

    def columns(block: Tensor) -> Tensor:
        return unpacked_words(block, 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)

    def rows(start: int, stop: int) -> Tensor:
        first = start // 8
        block = columns(words[:, first : -(-stop // 8)])
        return block[:, start - first * 8 : stop - first * 8].t().contiguous().to(torch.int8)

    zero = columns(tensors[f"{layer}.qzeros"]).t()
    return integers("int4", (n, k), rows, scale, zero, source)


def _raw(tensors: Tensors, layer: str, source: str) -> Archived | str:
    data = tensors.part(f"{layer}.raw")
    n, groups, size = data.get_shape()
    group = (size - 12) * 2
    if group < 8 or group % 8:
        return f"{source} has groups of {group}: not a multiple of 8"

    def read(start: int, stop: int) -> Any:
        part = data[start:stop]
        scale, zero, step = part[..., :12].contiguous().view(torch.float32).unbind(-1)
        nibbles = part[..., 12:]
        numbers = torch.stack([nibbles & 15, nibbles >> 4], -1).reshape(stop - start, -1)
        return grouped(numbers.view(torch.int8), scale * step, scale * zero)

    return Archived(Layout("int4", group, True), (n, groups * group), read, source, exact=False)
