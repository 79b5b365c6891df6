"""The build cache: damage, races, missing and failing compilers, unwritable folders."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sitsopt.runtime.kernels import build as build_module
from sitsopt.runtime.kernels.build import build, cache_dir
from sitsopt.runtime.kernels.toolchain import BuildError

if shutil.which(os.environ.get("CXX", "g++")) is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

TEXT = 'extern "C" int answer() { return 42; }\n'
FLAGS = ["-O0", "-fPIC"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path / "cache"))


def answer(path: Path) -> int:
    return ctypes.CDLL(str(path)).answer()


def test_second_build_is_the_first():
    first, second = (build("answer", TEXT, FLAGS, []) for _ in range(2))
    assert answer(first.path) == 42 and not first.cached
    assert second.cached and second.path == first.path and second.seconds == 0.0
    note = json.loads(first.path.with_suffix(".json").read_text())
    assert note["command"].endswith("kernel.o") and note["torch"]
    assert not list(first.path.parent.glob(".build-*"))


def test_text_and_flags_are_the_key():
    paths = {
        build("answer", text, flags, []).path
        for text, flags in [(TEXT, FLAGS), (TEXT + " ", FLAGS), (TEXT, [*FLAGS, "-g"])]
    }
    assert len(paths) == 3


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "delete", "note", "no note"])
def test_damage_is_built_anew(damage):
    path = build("answer", TEXT, FLAGS, []).path
    note = path.with_suffix(".json")
    data = path.read_bytes()
    path.unlink()  # never write into a file that may be mapped
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        path.write_bytes(bytes([*data[:-9], data[-9] ^ 1, *data[-8:]]))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage != "delete":
        path.write_bytes(data)
        note.write_text("{") if damage == "note" else note.unlink()
    again = build("answer", TEXT, FLAGS, [])
    assert not again.cached and answer(again.path) == 42
    assert build("answer", TEXT, FLAGS, []).cached


def test_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(
        BuildError, match=r"CXX=/nonexistent/g.. is not a program; unset CXX or name"
    ):
        build("answer", TEXT, FLAGS, [])
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: neither g\+\+ nor clang\+\+"):
        build("answer", TEXT, FLAGS, [])


def test_failing_compiler(tmp_path, monkeypatch):
    with pytest.raises(BuildError, match=r"failed: .*error"):
        build("broken", "int answer( {", FLAGS, [])
    assert not list(cache_dir().glob("broken*.so"))
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(BuildError, match="--version failed"):
        build("answer", TEXT, FLAGS, [])


def test_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot be written .*SITSOPT_CACHE names another folder"):
        build("answer", TEXT, FLAGS, [])


def test_cache_folder(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache" / "kernels"
    monkeypatch.delenv("SITSOPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "sitsopt" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "sitsopt" / "kernels"


BUILDER = textwrap.dedent("""
    import sys
    from sitsopt.runtime.kernels.build import build
    made = build("answer", sys.stdin.read(), ["-O0", "-fPIC"], [])
    print(made.path, made.cached)
""")


def spawn(**env) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env},
    )  # fmt: skip


def test_processes_that_build_at_once_build_once():
    running = [spawn() for _ in range(3)]
    outs = [p.communicate(TEXT)[0].split() for p in running]
    assert len({path for path, _ in outs}) == 1
    assert sorted(cached for _, cached in outs) == ["False", "True", "True"]


def test_a_killed_build_leaves_no_trace_and_no_lock(tmp_path):
    """The compiler sleeps, its caller is killed: the next one builds, and old leftovers are swept."""
    started = tmp_path / "started"
    slow = tmp_path / "slow-g++"
    slow.write_text(
        f'#!/bin/sh\ncase "$1" in --version) echo slow 1.0;; *) touch {started}; exec sleep 30;; esac\n'
    )
    slow.chmod(0o755)
    process = spawn(CXX=str(slow))
    process.stdin.write(TEXT)
    process.stdin.close()
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = list(cache_dir().glob(".build-*"))
    assert started.exists() and left
    assert answer(build("answer", TEXT, FLAGS, []).path) == 42
    for folder in left:
        os.utime(folder, (0, 0))
    build("other", TEXT + "//", FLAGS, [])
    assert not any(folder.exists() for folder in left)


def test_checksum_is_of_the_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert build_module._checksum(path).startswith("ba7816bf")
