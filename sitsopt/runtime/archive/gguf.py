"""Blocks of a GGUF file as numbers and scales (layouts: ggml's `ggml-common.h`).

| format | numbers | packed as | exact |
|---|---|---|---|
| Q4_0, Q4_1 | 0..15 | int4, groups of 32 | yes |
| Q5_0, Q5_1, Q8_0 | up to 8 bits | int8, groups of 32 | yes |
| Q4_K | 0..15 | int4, groups of 32 | products of scales are rounded to f16 |
| Q5_K, Q6_K | up to 6 bits | int8, groups of 32 and 16: 4 bits do not hold them | the same |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...graph.archived import Archived
from ...graph.packed import Layout, Rounded
from .numbers import grouped

Parts = tuple[
    Tensor, Tensor, Tensor | None
]  # numbers, scale, low: [..., K of a block], [..., groups of a block]


@dataclass(frozen=True)
class Format:
    """bytes of a block, and a function from blocks (uint8 [N, blocks, bytes]) to its parts; exact: whether its scales
    are f16."""

    bytes: int
    layout: Layout
    parts: Callable[[Tensor], Parts]
    exact: bool = True


def archived(
    name: str, kind: str, data: Any, file: str, rows: Tensor | None = None
) -> Archived | str:
    """A matrix of format `kind`, its bytes as a numpy array [N, bytes of a row]; `rows`: the order of its rows in the
    model, where that is another. A text says why it cannot be taken."""
    form = FORMATS.get(kind)
    if form is None:
        return f"{file} holds it in {kind}"

    def read(start: int, stop: int) -> Rounded:
        part = data[start:stop] if rows is None else data[rows[start:stop].numpy()]
        blocks = torch.tensor(part).view(len(part), -1, form.bytes)
        numbers, scale, low = form.parts(blocks)
        flat = [None if t is None else t.reshape(len(part), -1) for t in (scale, low)]
        assert flat[0] is not None
        return grouped(numbers.reshape(len(part), -1), flat[0], flat[1])

    one = form.parts(torch.zeros(1, form.bytes, dtype=torch.uint8))[0].shape[-1]
    shape = (len(data), data.shape[1] // form.bytes * one)
    return Archived(form.layout, shape, read, f"{file}: {name} in {kind}", form.exact)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(quants: Tensor) -> Tensor:
    """Bytes whose lower halves come first, then the higher ones."""
    return torch.cat([quants & 15, quants >> 4], -1).view(torch.int8)


def _q4_0(b: Tensor) -> Parts:
    return _nibbles(b[..., 2:]), _half(b, 0), None


def _q4_1(b: Tensor) -> Parts:
    return _nibbles(b[..., 4:]), _half(b, 0), _half(b, 2)


def _fifth(quants: Tensor, high: Tensor) -> Tensor:
    """Nibbles [..., 32] with the fifth bit of each out of 4 bytes."""
    bits = high[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _nibbles(quants) | (bits.flatten(-2) << 4).view(torch.int8)


def _q5_0(b: Tensor) -> Parts:
    return _fifth(b[..., 6:], b[..., 2:6]) - 16, _half(b, 0), None


def _q5_1(b: Tensor) -> Parts:
    return _fifth(b[..., 8:], b[..., 4:8]), _half(b, 0), _half(b, 2)


def _q8_0(b: Tensor) -> Parts:
    return b[..., 2:].contiguous().view(torch.int8), _half(b, 0), None


def _scales_of_8(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and lowest values of a K block's eight groups, f32: 6 bits each, in 12 bytes behind two f16."""
    first, second, third = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    low = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    return scale.float() * _half(b, 0).float(), -low.float() * _half(b, 2).float()


def _pairs(quants: Tensor) -> Tensor:
    """32 bytes at a time: the lower halves are a group, the higher ones the next."""
    four = quants.unflatten(-1, (4, 32))
    return torch.stack([four & 15, four >> 4], -2).flatten(-3)


def _q4_k(b: Tensor) -> Parts:
    return _pairs(b[..., 16:]).view(torch.int8), *_scales_of_8(b)


def _q5_k(b: Tensor) -> Parts:
    bits = b[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return (_pairs(b[..., 48:]) | (bits.flatten(-2) << 4)).view(torch.int8), *_scales_of_8(b)


def _q6_k(b: Tensor) -> Parts:
    low, high = b[..., :128].unflatten(-1, (2, 2, 32)), b[..., 128:192].unflatten(-1, (2, 1, 32))
    fours = torch.cat([low & 15, low >> 4], -2)
    twos = high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    numbers = (fours | (twos << 4)).flatten(-3).view(torch.int8) - 32
    scale = b[..., 192:208].contiguous().view(torch.int8).float()
    return numbers, scale * _half(b, 208).float(), None


FORMATS = {
    "Q4_0": Format(18, Layout("int4", 32), _q4_0),
    "Q4_1": Format(20, Layout("int4", 32, True), _q4_1),
    "Q5_0": Format(22, Layout("int8", 32), _q5_0),
    "Q5_1": Format(24, Layout("int8", 32, True), _q5_1),
    "Q8_0": Format(34, Layout("int8", 32), _q8_0),
    "Q4_K": Format(144, Layout("int4", 32, True), _q4_k, exact=False),
    "Q5_K": Format(176, Layout("int8", 32, True), _q5_k, exact=False),
    "Q6_K": Format(210, Layout("int8", 16), _q6_k, exact=False),
}
