"""The read probe: its answer is kept a machine, and a failure leaves None."""

import json

import pytest

from sitsopt.runtime import bandwidth


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def answers(monkeypatch):
    """What the probe says, one answer after the other; the list of calls."""

    def give(*values):
        rest = iter(values)
        monkeypatch.setattr(bandwidth, "probe", lambda: next(rest))

    return give


def test_an_answer_is_kept(answers, cache):
    answers(30.0)
    assert bandwidth.read_bandwidth_gbs(measure=False) is None
    assert bandwidth.read_bandwidth_gbs() == 30.0
    assert bandwidth.read_bandwidth_gbs() == 30.0
    assert bandwidth.read_bandwidth_gbs(measure=False) == 30.0
    assert len(list(cache.iterdir())) == 1


def test_the_best_answer_is_kept(answers):
    answers(30.0, 12.0, 31.0)
    bandwidth.read_bandwidth_gbs()
    assert bandwidth.read_bandwidth_gbs(cached=False) == 12.0
    assert bandwidth.read_bandwidth_gbs() == 30.0
    assert bandwidth.read_bandwidth_gbs(cached=False) == 31.0
    assert bandwidth.read_bandwidth_gbs() == 31.0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"read_gbs": "x"}', '{"read_gbs": -1}', "null"]
)
def test_a_broken_file_is_measured_again(text, answers, cache):
    answers(1.0, 2.0)
    bandwidth.read_bandwidth_gbs()
    file = next(cache.iterdir())
    file.write_text(text)
    assert bandwidth.read_bandwidth_gbs() == 2.0
    assert json.loads(file.read_text()) == {"read_gbs": 2.0}


def test_a_folder_that_cannot_be_written(answers, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path / "file"))
    answers(5.0)
    assert bandwidth.read_bandwidth_gbs() == 5.0


@pytest.mark.parametrize("error", [MemoryError, ImportError, OSError])
def test_a_probe_that_fails(error, monkeypatch):
    def fail():
        raise error("no")

    monkeypatch.setattr(bandwidth, "probe", fail)
    assert bandwidth.read_bandwidth_gbs() is None


def test_another_machine_has_another_file(monkeypatch):
    key = bandwidth._machine_key()
    monkeypatch.setattr(bandwidth, "_cpu_model", lambda: "another")
    assert bandwidth._machine_key() != key


def test_the_probe_reads(monkeypatch):
    assert bandwidth.probe(buffer_bytes=1 << 20, budget_s=0.0) > 0
