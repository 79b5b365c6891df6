"""Offsets beyond 2^31 elements: tensors that map sparse files, so that no memory is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sitsopt.emit.attention import FlashAttention
from sitsopt.emit.rope import Rope
from sitsopt.emit.rowwise import Rowwise
from sitsopt.emit.triton import attention, elementwise, rope, rowwise
from sitsopt.emit.triton.forms import form
from sitsopt.runtime.triton.attend import Cache, Extras, attend
from sitsopt.runtime.triton.interpreter import interpret
from tests.triton.harness import launch, poisoned

STEP = 2**30 + 16  # elements from row to row: the third row lies beyond 2^31


def spread(folder: Path, rows: torch.Tensor) -> torch.Tensor:
    """The same rows, a huge stride apart."""
    path = folder / "rows"
    size = STEP * (rows.shape[0] - 1) + rows.shape[1]
    with path.open("wb") as file:
        file.truncate(size * rows.element_size())
    flat = torch.from_file(str(path), shared=True, size=size, dtype=rows.dtype)
    far = flat.as_strided(rows.shape, (STEP, 1))
    far.copy_(rows)
    return far


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half()


def test_elementwise(rows: torch.Tensor, tmp_path: Path) -> None:
    kernel = form("swiglu_halves", "f16", wide=True)
    source = elementwise.source(kernel)
    far, out = spread(tmp_path, rows), poisoned(3, 32, dtype=torch.float16)
    launch(
        source, elementwise.grid(kernel, source, (3, 32)), far, far[:, 32:], out, 3, 32, STEP, STEP
    )
    want = torch.nn.functional.silu(rows[:, :32].float()) * rows[:, 32:].float()
    torch.testing.assert_close(out.float(), want, rtol=1e-3, atol=1e-3)


def test_rowwise(rows: torch.Tensor, tmp_path: Path) -> None:
    source = rowwise.source(Rowwise("rms_norm", "f16", 64, wide=True))
    out = poisoned(3, 64, dtype=torch.float16)
    launch(source, rowwise.grid(source, 3), spread(tmp_path, rows), out, 1e-5, 3, STEP)
    want = torch.nn.functional.rms_norm(rows.float(), (64,), eps=1e-5)
    torch.testing.assert_close(out.float(), want, rtol=1e-3, atol=1e-3)


def test_rope(rows: torch.Tensor, tmp_path: Path) -> None:
    source = rope.source(Rope("f16", 64, wide=True))
    cos, sin = torch.ones(1, 3, 64).half(), torch.zeros(1, 3, 64).half()
    out = poisoned(3, 64, dtype=torch.float16)
    launch(
        source, rope.grid(source, 3), spread(tmp_path, rows), cos, sin, out, 3, 1, 3, 0, 0, STEP, 0, 64, 0, 0, 64
    )  # fmt: skip
    assert torch.equal(out, rows)


def test_keys_of_a_cache(rows: torch.Tensor, tmp_path: Path) -> None:
    kernel = FlashAttention("f16", 64, 64, 1, wide=True)
    source = attention.source(kernel).tuned({"ROWS": 16}, 4, 1)
    far = spread(tmp_path, rows)[None, None]
    q, out = torch.randn(1, 1, 1, 64).half(), torch.full((1, 1, 1, 64), 77.0).half()
    attend(interpret, kernel, q, Cache(far, far), 3, Extras(scale=0.125), out=out, source=source)
    want = torch.softmax(q.float()[0, 0] @ rows.float().t() * 0.125, -1) @ rows.float()
    torch.testing.assert_close(out.float()[0, 0], want, rtol=2e-3, atol=2e-3)
