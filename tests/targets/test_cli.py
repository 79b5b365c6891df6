"""`sitsopt targets`: the list, and a page with every fact and its source."""

import json

import pytest

from sitsopt.cli.targets import targets
from sitsopt.runtime import bandwidth


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path))
    monkeypatch.setattr(bandwidth, "probe", lambda: 30.0)


def test_list(capsys):
    assert targets() == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200 SXM, 141 GB." in out
    assert "* this machine" in out


def test_list_as_json(capsys):
    assert targets(as_json=True) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["h200"]["memory"]["bandwidth_gbs"] == 4800


def test_a_page(capsys):
    assert targets("h200") == 0
    out = capsys.readouterr().out
    assert "4800" in out
    assert "NVIDIA H200 Tensor Core GPU Datasheet" in out


def test_what_is_unknown_is_said(capsys):
    assert targets("cpu-amx") == 0
    assert "not known: bandwidth_gbs" in capsys.readouterr().out


def test_this_machine(capsys):
    assert targets("auto", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["id"]


def test_an_architecture(capsys):
    assert targets("sm_90", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "h100"


def test_an_unknown_one(capsys):
    assert targets("h20") == 2
    assert "did you mean `h200`?" in capsys.readouterr().err
    assert targets("h20", as_json=True) == 2
    assert json.loads(capsys.readouterr().out)["errors"]
