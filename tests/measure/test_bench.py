from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from sitsopt.measure import fresh, llamacpp
from sitsopt.measure.bench import BenchOptions, Measured, _ratios, bench
from sitsopt.measure.decode import Run
from sitsopt.measure.engines import SitsOptions
from sitsopt.measure.errors import InputError
from sitsopt.measure.foreign import RUNTIMES, ForeignEngine, why_not
from sitsopt.measure.models import load

QUICK = SitsOptions(extra={"lowering": "eager"})


def test_the_result_has_the_fields_of_the_contract(tiny_llama: Path):
    torch._dynamo.reset()
    options = BenchOptions(
        str(tiny_llama), ("eager", "sits", "llama.cpp"), context=16, new=4, rounds=3, starts=False,
        dtype="f32", sits=QUICK,
    )  # fmt: skip
    heard: list[str] = []
    result = bench(options, heard.append)
    assert {"threads", "bandwidth_gbs", "context", "new_tokens", "engines", "ratios"} <= set(result)
    assert list(result["engines"]) == ["sits", "eager"]
    for row in result["engines"].values():
        assert {"prefill_tps", "decode_tps", "compile_s", "warm_s", "peak_mb"} <= set(row)
        assert len(row["decode_runs"]) == 3 and row["recompiles"] == 0
        assert row["decode_tps"] == sorted(row["decode_runs"])[1]
    assert set(result["ratios"]) == {"sits/eager"}
    assert set(result["ratios"]["sits/eager"]) == {"prefill", "decode"}
    assert "llama.cpp" in result["skipped"]
    rounds = [line for line in heard if line.startswith("round")]
    assert [line.split(": ")[1] for line in rounds] == ["sits", "eager"] * 3, "A B A B"


def test_a_fresh_process_tells_its_start_and_memory(tiny_llama: Path):
    with fresh.empty_caches() as folder:
        start = fresh.start(fresh.Job("eager", str(tiny_llama), dtype="f32", context=8), folder)
        assert start.first_s > 0 and 0 < start.resident_mb <= start.peak_mb < 1000
    assert not folder.exists()
    with pytest.raises(fresh.ChildFailed, match="no model `nope`"):
        fresh.start(fresh.Job("eager", "nope"))


def test_caches_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with fresh.caches_in(tmp_path / "a"):
        inside = Path(os.environ["SITSOPT_CACHE"])
        assert (inside / "models").resolve() == (tmp_path / "own" / "models").resolve()
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "a" / "triton")
    assert os.environ["SITSOPT_CACHE"] == str(tmp_path / "own")
    assert "TRITON_CACHE_DIR" not in os.environ


def test_medians_and_ratios():
    runs = [Run(1.0, 2.0, []), Run(2.0, 4.0, []), Run(4.0, 1.0, [])]
    row = Measured("sits", runs=runs).as_dict(context=100, new=8)
    assert (row["prefill_tps"], row["decode_tps"]) == (50.0, 4.0)
    other = {**row, "decode_tps": 2.0}
    engines = {"sits": row, "sits:auto,int4": row, "eager": other}
    ratios = _ratios(engines)
    assert ratios["sits/eager"] == {"prefill": 1.0, "decode": 2.0}
    assert set(ratios) == {
        "sits/eager", "sits/sits:auto,int4", "sits:auto,int4/sits", "sits:auto,int4/eager",
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [{"context": 0}, {"new": 0}, {"rounds": 0}, {"against": ("x",)}])
def test_what_cannot_be_measured_is_refused_before_loading(wrong):
    with pytest.raises(InputError):
        bench(BenchOptions("no such model", **wrong))


FAKE_RUNTIME = """
import json, sys
print(json.dumps({"settings": "fake", "load_s": 0.1, "peak_mb": 1.0}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    print(json.dumps({"prefill_s": 1.0, "decode_s": 2.0, "tokens": job["ids"], "peak_mb": 2.0}), flush=True)
"""


def test_another_runtime_sleeps_between_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "fake_runtime.py").write_text(FAKE_RUNTIME)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(RUNTIMES, "llama.cpp", ("fake_runtime", (), ""))
    engine = ForeignEngine("llama.cpp", Path("x.gguf"), 8, 1)
    try:
        for _ in range(2):
            assert _is_stopped(engine.process.pid)
            run = engine.run(torch.tensor([[5, 6]]), 4)
            assert (run.prefill_s, run.decode_s, run.tokens) == (1.0, 2.0, [5, 6])
        assert engine.settings == "fake" and engine.peak_mb == 2.0
    finally:
        engine.close()
    assert engine.process.returncode == -signal.SIGKILL


def test_a_runtime_that_dies_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "dying_runtime.py").write_text("raise SystemExit('no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(RUNTIMES, "llama.cpp", ("dying_runtime", (), ""))
    with pytest.raises(InputError, match=r"llama\.cpp ended: no such file"):
        ForeignEngine("llama.cpp", Path("x.gguf"), 8, 1)


def test_why_a_runtime_is_left_out(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    loaded = load(str(tiny_llama), "f32", device="cpu")
    monkeypatch.setitem(RUNTIMES, "llama.cpp", ("x", ("no_such_package",), "pip install it"))
    assert why_not("llama.cpp", loaded) == "not installed: pip install it"
    monkeypatch.setitem(RUNTIMES, "llama.cpp", ("x", ("json",), "pip install it"))
    assert "reads a .gguf file" in (why_not("llama.cpp", loaded) or "")
    loaded.gguf = Path("a.gguf")
    assert why_not("llama.cpp", loaded) is None
    assert llamacpp.main.__doc__


def _is_stopped(pid: int) -> bool:
    import time

    for _ in range(100):
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False
