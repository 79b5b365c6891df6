"""Blocks of GGUF files against the gguf package's own dequantization."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

from sitsopt.graph.packed import lay_out, unpack
from sitsopt.runtime.archive.gguf import FORMATS, archived

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block's f16 lie


def blocks(kind, rows=35, k=512):
    """Rows of valid blocks: any bytes but for f16 scales of an ordinary size."""
    count, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (rows, k // count, size), dtype=np.uint8)
    for at in SCALES.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        halves = rng.uniform(-0.02, 0.02, (rows, k // count, 1)).astype(np.float16)
        data[..., at : at + 2] = halves.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_stand_for_what_the_file_says(kind):
    data = blocks(kind)
    want = torch.tensor(quants.dequantize(data, GGMLQuantizationType[kind]))
    found = archived("w", kind, data, "file")
    assert found.shape == (35, 512)
    plain = unpack(lay_out(found.read(0, 35), found.layout), 35, 512, found.layout)
    if kind in EXACT:
        assert torch.equal(plain, want) and torch.equal(found.values(3, 20), want[3:20])
    else:  # a scale or a lowest value moves by half a step of f16 at most
        groups = want.view(35, -1, found.layout.group)
        bound = 2.0**-11 * (groups.abs().amax(2, keepdim=True) + 63 * 63 * 0.02 / 64)
        assert ((plain - want).view_as(groups).abs() <= bound).all()
        assert (plain - want).norm() < 3e-4 * want.norm()


def test_rows_in_another_order_and_formats_without_a_form():
    order = torch.randperm(35)
    data = blocks("Q4_1")
    found, moved = archived("w", "Q4_1", data, "f"), archived("w", "Q4_1", data, "f", order)
    assert torch.equal(moved.values(2, 9), found.values(0, 35)[order[2:9]])
    assert archived("w", "Q2_K", data, "f.gguf") == "f.gguf holds it in Q2_K"
