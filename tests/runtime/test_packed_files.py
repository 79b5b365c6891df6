"""Packed weights on disk: mapped at the next start, a miss where anything differs, never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sitsopt.graph import packed
from sitsopt.graph.ops import packed as ops_packed
from sitsopt.runtime import packed_files

SETTINGS = [("int8", 0, False, ""), ("int4", 64, True, ""), ("fp8", 128, False, "block")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path))
    return tmp_path / "packed"


def pack(weight, settings=SETTINGS[0]):
    return torch.ops.sits.pack(weight, *settings, "")


def weight(n=272, k=320):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0))


def never(*args):
    raise AssertionError("packed again")


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s[0])
def test_the_next_start_maps_it(folder, monkeypatch, settings):
    w = weight()
    want = packed.pack(w, *settings)
    torch.testing.assert_close(pack(w, settings), want, rtol=0, atol=0)
    (file,) = folder.iterdir()
    monkeypatch.setattr(ops_packed, "pack", never)
    found = pack(w.clone(), settings)
    assert torch.equal(found, want) and found.data_ptr() % packed_files.LINE == 0
    assert packed.error_of(found) == packed.error_of(want)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split() for line in maps if str(file) in line]
    low, high = (int(end, 16) for end in mapped[0][0].split("-"))
    assert low <= found.data_ptr() < high


def test_another_weight_dtype_or_setting_is_another_file(folder):
    w = weight()
    pack(w)
    pack(w.bfloat16())
    pack(w, ("int8", 64, False, ""))
    w[0, 0] += 1
    assert torch.equal(pack(w), packed.pack(w, *SETTINGS[0]))
    assert len(list(folder.iterdir())) == 4


def test_a_damaged_file_is_a_miss(folder):
    w = weight()
    want = pack(w)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"x" * len(whole)):
        os.unlink(file)  # as every writer does: a mapped file is never written over
        file.write_bytes(damaged)
        assert torch.equal(pack(w), want)
        assert file.read_bytes() == whole


def test_small_weights_and_full_disks(folder, monkeypatch):
    pack(weight(16, 64))
    assert not folder.exists()
    monkeypatch.setattr(packed_files, "SPARE", 1 << 60)
    pack(weight())
    assert list(folder.iterdir()) == []
    folder.rmdir()
    folder.write_text("no folder")
    assert torch.equal(pack(weight()), packed.pack(weight(), *SETTINGS[0]))


def test_the_oldest_go(folder, monkeypatch):
    first = weight()
    size = pack(first).nbytes
    (old,) = folder.iterdir()
    os.utime(old, (1, 1))
    monkeypatch.setattr(packed_files, "LIMIT", size + size // 2)
    pack(weight() * 2)
    (left,) = folder.iterdir()
    assert left != old


def test_every_tensor_at_a_line_and_others_can_read_it(tmp_path):
    tensors = {
        "a.b": torch.arange(33, dtype=torch.uint8).view(3, 11),
        "c": torch.ones(64, dtype=torch.uint8),
    }
    file = tmp_path / "some.safetensors"
    packed_files.write(file, tensors, {"note": "x"})
    found = load_file(file)
    assert all(torch.equal(found[n], t) for n, t in tensors.items())
    assert all(found[n].data_ptr() % 64 == 0 for n in tensors)
