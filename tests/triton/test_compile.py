"""Kernels compiled to machine code without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sitsopt.cli.kernels import find_target, kernels
from sitsopt.emit.triton.manifest import entries, targets
from sitsopt.emit.triton.source import Source, pointer
from sitsopt.emit.triton.tune import candidates
from sitsopt.runtime.triton import compile as compiler
from sitsopt.runtime.triton.compile import Facts, compile_all
from sitsopt.runtime.triton.fit import complaint, fit
from sitsopt.runtime.triton.occupancy import occupancy

SAMPLE = (
    "swiglu_bf16", "add_rms_norm_bf16_4096", "attention_decode_bf16_64_g4",
    "matmul_skinny_bf16_4096x4096_w_i4_64_low", "draw_f32",
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path_factory, monkeypatch: pytest.MonkeyPatch, request) -> None:
    if "slow" in request.keywords:
        return
    folder = tmp_path_factory.getbasetemp() / "kernels"
    monkeypatch.setenv("SITSOPT_CACHE", str(folder))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_sample_compiles(arch: str) -> None:
    known = {entry.name: entry.source for entry in entries(arch)}
    found = fit([known[name] for name in SAMPLE], find_target(arch), jobs=1)
    assert [one.wrong for one in found] == [""] * len(SAMPLE)
    assert all(0 < one.facts.registers <= 256 for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("arch", targets())
def test_the_whole_manifest_compiles(arch: str) -> None:
    known = [entry for entry in entries(arch) if not entry.excused]
    found = fit([entry.source for entry in known], find_target(arch))
    assert {one.source.name: one.wrong for one in found if one.wrong} == {}


def source(body: str) -> Source:
    text = f"import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef bad(x_ptr):\n    {body}\n"
    return Source("bad", "elementwise", text, (pointer("x_ptr", "f32"),))


def test_a_wrong_text_is_one_kernel_s_error() -> None:
    (facts,) = compile_all([source("tl.store(x_ptr, nothing)")], ("cuda", 80, 32), 1)
    assert "nothing" in facts.error


def test_a_crash_of_the_compiler_is_one_kernel_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(source("pass"), text="import os\nos._exit(9)\n")
    good = source("tl.store(x_ptr, 1.0)")
    first, second = compile_all([broken, good], ("cuda", 80, 32), 1)
    assert first.error == "the compiler process ended with 9"
    assert not second.error and second.registers


def test_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    one = source("tl.store(x_ptr, 2.0)")
    first = compile_all([one], ("cuda", 80, 32), 1)
    monkeypatch.setattr(compiler, "_Child", None)
    assert compile_all([one], ("cuda", 80, 32), 1) == first


def test_candidates_get_smaller_and_never_repeat() -> None:
    for entry in entries("sm_80"):
        ladder = candidates(entry.source)
        assert ladder[0] == entry.source
        assert len({(one.constants, one.warps, one.stages) for one in ladder}) == len(ladder)


def test_complaints() -> None:
    target = find_target("rtx5090")
    assert "101KiB" not in complaint(Facts(32, 0, 1000, 128), target)
    assert "99 KiB" in complaint(Facts(32, 0, 102_000, 128), target)
    assert "spilled" in complaint(Facts(255, 8, 0, 128), target)


def test_occupancy_by_registers_shared_memory_and_threads() -> None:
    target = find_target("h100")
    assert occupancy(Facts(32, 0, 0, 128), target) == 1.0
    assert occupancy(Facts(128, 0, 0, 256), target) == 512 / 2048
    assert occupancy(Facts(32, 0, 100_000, 256), target) == 512 / 2048


def test_names_are_unique_and_say_the_family() -> None:
    known = entries("sm_80")
    assert len({entry.name for entry in known}) == len(known)
    assert {entry.source.family for entry in known} == {
        "elementwise", "rowwise", "rope", "attention", "matmul", "cache_write", "sample",
    }  # fmt: skip


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels("sm_90", family="rope", jobs=1, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["target"] == "h100"
    fields = {
        "name",
        "family",
        "registers",
        "spills",
        "shared_bytes",
        "occupancy",
        "bytes",
        "roofline",
    }
    assert all(fields <= set(row) for row in told["kernels"])
    assert kernels("h200", show="rope_half_bf16_64") == 0
    assert "def rope_half_bf16_64(" in capsys.readouterr().out
    assert kernels("h200", show="rope_half_bf16_64", as_="ptx") == 0
    assert ".target sm_90a" in capsys.readouterr().out
    assert kernels("h200", show="rope_half_bf16_64", as_="sass") == 0
    assert "STG" in capsys.readouterr().out


def test_the_verb_on_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels("sm_91") == 2
    assert kernels("cpu") == 2
    assert kernels("h200", show="rope_half_bf16_65") == 2
    assert kernels("h200", show="rope_half_bf16_64", as_="elf") == 2
    assert kernels("h200", family="ropes") == 2
    assert "rope_half_bf16_64" in capsys.readouterr().err
