from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sitsopt.cli import _common, bench, check
from sitsopt.cli import run as run_verb
from sitsopt.cli._status import status
from sitsopt.cli.app import app
from sitsopt.measure.errors import InputError

VERBS = (
    "run",
    "bench",
    "check",
    "bisect",
    "explain",
    "rules",
    "recipes",
    "targets",
    "verify",
    "kernels",
)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch):
    """The backend without Inductor, which would take most of a minute."""
    monkeypatch.setattr(_common, "EXTRA", {"lowering": "eager"})
    torch._dynamo.reset()


def call(*arguments: str) -> int:
    return status(app, list(arguments))


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]):
    assert call(verb, "--help") == 0
    text = capsys.readouterr().out
    assert f"sitsopt {verb}" in text.split("Usage", 1)[1].split("\n", 1)[1]
    assert "--json" in text


def test_help_and_rules_load_no_torch():
    code = (
        "import sys\n"
        "from sitsopt.cli._status import status\n"
        "from sitsopt.cli.app import app\n"
        "status(app, ['--help']); status(app, ['rules', '--json'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_run_answers_and_tells(tiny_llama: Path, fast, capsys: pytest.CaptureFixture[str]):
    assert call("run", str(tiny_llama), "Hello", "--new", "4", "--against", "eager", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == "Hello" and found["new_tokens"] == 4
    assert set(found["engines"]) == {"sits", "eager"} and set(found["ratios"]) == {"sits/eager"}
    assert found["memory_mb"] > 0 and found["applied"]["graphs"]
    assert call("run", str(tiny_llama), "Hello", "--new", "4", "--rounds", "1") == 0
    shown = capsys.readouterr().out
    assert "> Hello" in shown and "tokens/s" in shown


def test_bench_prints_json_and_a_table(tiny_llama: Path, fast, capsys: pytest.CaptureFixture[str]):
    arguments = [
        "bench", str(tiny_llama), "--against", "eager,llama.cpp", "--context", "8", "--new", "2",
        "--rounds", "1", "--no-starts",
    ]  # fmt: skip
    assert call(*arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["ratios"]) == {"sits/eager"}
    _common.show(bench.as_table(result))
    table = capsys.readouterr().out
    assert "eager" in table and "llama.cpp: " in table


def test_bench_of_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from sitsopt.runtime.kernels import bench as measured

    line = {
        "name": "linears", "shape": "576x576", "rows": 1, "gbs": 9.5, "probe_gbs": 10.0,
        "ratio": 0.95, "versus": {"aten": 1.4}, "dtype": "bf16", "cached": False,
    }  # fmt: skip
    monkeypatch.setattr(measured, "bench_kernels", lambda: [line])
    assert call("bench", "--kernels", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kernels"] == [line]
    assert call("bench", "--kernels") == 0
    assert "aten 1.40x" in capsys.readouterr().out


def test_check_exits_0_and_1(
    tiny_llama: Path, fast, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from sitsopt.measure.check import CheckOptions

    def small(given, quick, ppl_within):
        return CheckOptions(1, 3, 64, 32, False, ppl_within, given.sits())

    monkeypatch.setattr(check, "make_options", small)
    assert call("check", str(tiny_llama)) == 0
    assert "passed" in capsys.readouterr().out
    assert call("check", str(tiny_llama), "--ppl-within", "-1", "--json") == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "nope"], "no model `nope`"),
        (["bench", "smollm2", "--against", "vllm"], "unknown engine `vllm`"),
        (["run", "smollm2", "--against", "llama.cpp"], "`sitsopt bench` also runs llama.cpp"),
        (["check", "smollm2", "--dtype", "int3"], "unknown dtype"),
        (["rules", "fuse/nope"], "there is no rule"),
        (["rules", "new"], "the last word is missing"),
        (["recipes", "a", "b"], "takes one name"),
        (["frobnicate"], "No such command"),
        (["run"], "Missing argument"),
        (["bench"], "name a model"),
    ],
)
def test_bad_input_exits_2_with_its_reason(arguments, words, capsys: pytest.CaptureFixture[str]):
    assert call(*arguments) == 2
    said = capsys.readouterr()
    assert words in said.err and "Traceback" not in said.err
    if "--json" not in arguments and arguments != ["frobnicate"]:
        assert call(*arguments, "--json") == 2
        problems = json.loads(capsys.readouterr().out)["errors"]
        assert words in problems[0]["problem"]


@pytest.mark.parametrize(
    "error, code", [(KeyboardInterrupt(), 130), (InputError("bad"), 2), (BrokenPipeError(), 0)]
)
def test_how_a_verb_ends_is_how_the_program_ends(error, code, monkeypatch: pytest.MonkeyPatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(sys, "stderr", open("/dev/null", "w"))  # noqa: SIM115  closed by the test
    monkeypatch.setattr(run_verb, "run", fail)
    assert call("run", "smollm2") == code


def test_a_bug_keeps_its_trace(monkeypatch: pytest.MonkeyPatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(run_verb, "run", fail)
    with pytest.raises(ZeroDivisionError):
        call("run", "smollm2")
