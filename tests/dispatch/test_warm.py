"""A second process starts from disk, says as much as the first, and never believes a bad entry."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sitsopt.dispatch import disk
from sitsopt.dispatch.versions import available

pytestmark = pytest.mark.skipif(bool(available()), reason=available() or "dict versions work")

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
    def forward(self, x, cache):
        y = self.norm(x)
        cache[1].copy_(x[0])
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)), FACTOR * cache.sum()
"""
RUN = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from net import Net
import sitsopt
from sitsopt.whole import compiled_call
torch.manual_seed(0)
model = Net().eval()
call = compiled_call(model, json.loads(sys.argv[2]))
for rows in map(int, sys.argv[3].split(",")):
    x, cache, mine = torch.randn(rows, 8), torch.zeros(4, 8), torch.zeros(4, 8)
    with torch.no_grad():
        want, got = model(x, mine), call(x, cache)
    assert torch.allclose(got[0], want[0], atol=1e-5) and torch.equal(cache, mine), "wrong result"
    assert torch.allclose(got[1], want[1], atol=1e-5), "wrong result"
record = sitsopt.report(model).record
graphs = [graph.as_dict() for graph in record.graphs]
for graph in graphs:
    for name in ("from_disk", "capture_ms", "rewrite_ms", "compile_ms"):
        graph.pop(name, None)
print(json.dumps({"from_disk": call.from_disk, "given_up": call.given_up, "graphs": graphs,
                  "effective": [vars(e) for e in record.effective]}))
"""


class Folder:
    """A cache, a model's file, and processes that use both."""

    def __init__(self, path: Path) -> None:
        self.path, self.cache = path, path / "cache"
        self.write(1)

    def write(self, factor: int) -> None:
        (self.path / "net.py").write_text(f"FACTOR = {factor}\n{MODEL}")

    def command(self, rows: str = "3", **options: Any) -> list[str]:
        return [sys.executable, "-c", RUN, str(self.path), json.dumps(options), rows]

    @property
    def env(self) -> dict[str, str]:
        inductor = str(self.path / "inductor")
        return {**os.environ, "SITSOPT_CACHE": str(self.cache), "TORCHINDUCTOR_CACHE_DIR": inductor}

    def run(self, **options: Any) -> dict[str, Any]:
        done = subprocess.run(self.command(**options), env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert not found["given_up"]
        return found

    def entries(self) -> list[Path]:
        return sorted((self.cache / "graphs").glob("*/*.bin"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = Folder(tmp_path_factory.mktemp("warm"))
    made.first = made.run()  # type: ignore[attr-defined]
    return made


def test_the_second_process_starts_from_disk_and_tells_the_same(folder: Folder) -> None:
    first = folder.first  # type: ignore[attr-defined]
    assert first["from_disk"] == 0
    again = folder.run()
    assert again["from_disk"] == 1
    assert again["graphs"] == first["graphs"]
    assert again["effective"] == first["effective"]
    assert first["graphs"][0]["sites"]


def test_a_call_of_another_size_is_compiled_beside_one_from_disk(folder: Folder) -> None:
    for entry in folder.entries()[1:]:
        entry.unlink()
    both = folder.run(rows="3,5")
    assert both["from_disk"] == 1 and len(both["graphs"]) == 2
    (other,) = [
        e
        for e in folder.entries()
        if e.stat().st_mtime == max(f.stat().st_mtime for f in folder.entries())
    ]
    other.unlink()


def test_a_damaged_entry_is_a_miss(folder: Folder) -> None:
    (entry,) = folder.entries()
    whole = entry.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        entry.write_bytes(broken)
        assert folder.run()["from_disk"] == 0
        assert disk.read(entry) is not None, "the entry is written anew"
    assert folder.run()["from_disk"] == 1


@pytest.mark.slow
def test_other_settings_and_other_code_are_other_entries(folder: Folder) -> None:
    assert folder.run(exclude=["nothing@nowhere#0"])["from_disk"] == 0
    folder.write(2)  # the result of the old code would be wrong
    assert folder.run()["from_disk"] == 0
    assert folder.run()["from_disk"] == 1
    folder.write(1)
    assert folder.run()["from_disk"] == 0
    assert folder.run()["from_disk"] == 1


@pytest.mark.slow
def test_a_kill_while_an_entry_is_written(folder: Folder) -> None:
    for entry in folder.entries():
        entry.unlink()
    slow = (
        "import os, time\nos.replace = lambda *a: (print('writing', flush=True), time.sleep(60))\n"
    )
    command = folder.command()
    command[2] = "import sitsopt.dispatch.disk\n" + slow + command[2]
    running = subprocess.Popen(command, env=folder.env, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    line = running.stdout.readline()
    while "writing" not in line and running.poll() is None:
        line = running.stdout.readline()
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert not folder.entries()
    assert folder.run()["from_disk"] == 0
    assert folder.run()["from_disk"] == 1


@pytest.mark.slow
def test_two_processes_at_once(folder: Folder) -> None:
    for entry in folder.entries():
        entry.unlink()
    both = [
        subprocess.Popen(folder.command(), env=folder.env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [p.communicate()[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert folder.run()["from_disk"] == 1


def test_a_full_or_unwritable_disk_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path))
    path = disk.folder_of("k") / "entry.bin"
    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in disk.write(path, b"payload")
    assert list(path.parent.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path / "a file"))
    (tmp_path / "a file").write_text("")
    assert disk.write(disk.folder_of("k") / "entry.bin", b"payload")


def test_the_cache_stays_within_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path))
    monkeypatch.setenv("SITSOPT_CACHE_LIMIT", "5000")
    paths = [disk.folder_of(str(i)) / "entry.bin" for i in range(4)]
    for age, path in enumerate(paths):
        assert disk.write(path, bytes(2000)) == ""
        os.utime(path, (time.time() - 100 + age, time.time() - 100 + age))
        disk.trim()
    assert [p.exists() for p in paths] == [False, False, True, True]
    assert disk.read(paths[2]) is not None  # used: now the youngest
    disk.write(disk.folder_of("new") / "entry.bin", bytes(2000))
    assert paths[2].exists()
    assert not paths[3].exists()
