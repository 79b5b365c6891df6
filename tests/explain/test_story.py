from __future__ import annotations

import os
from pathlib import Path

import pytest

from sitsopt.explain.story import Story
from sitsopt.explain.text import as_text
from sitsopt.planning import fired
from sitsopt.reporting import Report
from sitsopt.rewrite.record import GraphRecord, Record
from sitsopt.spec.errors import SpecError

from .records import graph, miss, record, site

GOLDEN = Path(__file__).parent / "golden"
RULES = {
    "fuse/swiglu": "Multiply by SiLU in one kernel.", "fuse/rope": "Rotary embedding.",
    "attention/gqa": "Grouped attention.", "fuse/rms_norm": "RMS norm.", "fold/conv_bn": "Fold BN.",
    "fuse/late": "Comes too late.", "fuse/quiet": "Never fits.",
}  # fmt: skip


@pytest.fixture
def told() -> Report:
    return Report(record(), dict(RULES), {"fuse/geglu": "it is slower here"}, bandwidth_gbs=3350.0)


def test_decode_and_prefill_of_a_layer_are_one_site(told: Report) -> None:
    assert told.fired("fuse/swiglu") == 2
    assert told.fired("fuse/rope") == 4
    assert [s.ordinal for s in told.spots["fuse/rope"]] == [0, 1, 0, 1]
    assert list(told.spots["fuse/rope"][0].graphs) == ["decode", "prefill"]


def test_counts_are_those_that_expectations_are_held_against(told: Report) -> None:
    counts = fired(told.record.graphs)
    assert {rule: len(found) for rule, found in told.spots.items()} == dict(counts)


def test_a_site_that_only_one_graph_has_counts() -> None:
    decode, prefill = graph("decode", 1), graph("prefill", 1)
    prefill.sites.append(site("fuse/swiglu", "model.head", "mul_9"))
    assert Story(Record(graphs=[decode, prefill])).fired("fuse/swiglu") == 3


def test_misses_are_told_once_and_hopeless_ones_not_at_all(told: Report) -> None:
    assert len(told.attempts) == 8
    shown = told.shown
    assert [(g.miss.rule, len(g.attempts), g.graphs) for g in shown] == [
        ("attention/gqa", 2, ["decode", "prefill"]),
    ]
    taken = [a for a in told.attempts if a.taken_by]
    assert {(a.miss.rule, a.taken_by) for a in taken} == {
        ("fuse/swiglu", "fuse/rope"), ("fuse/late", "fuse/swiglu")
    }  # fmt: skip


def test_text(told: Report) -> None:
    golden = GOLDEN / "report.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(f"{told}\n")
    assert f"{told}\n" == golden.read_text()


def test_markup_in_a_record_is_text() -> None:
    odd = Record("t[bold]", "r", [GraphRecord("g[/]", fallback="[red]no[/red]")])
    odd.graphs[0].misses.append(miss("fuse/x", "m[0]", "n", found="[1, 2]", condition="T in [f16]"))
    text = as_text(Report(odd))
    for part in ("t[bold]", "g[/]", "[red]no[/red]", "m[0]", "found [1, 2]", "T in [f16]"):
        assert part in text


def test_packed_weights_say_bytes_and_errors() -> None:
    head = site("weights/int4", "lm_head", "linear_9", weight_error=0.11)
    other = site("weights/int4", "model.layers.0.mlp.down_proj", "linear_1", weight_error=0.09)
    text = str(Report(Record("cpu", "int4", [GraphRecord("decode", sites=[head, other])]), {}))
    assert "weights are off by 9.00% to 11.00% (lm_head)" in " ".join(text.split())


def test_nothing_recorded_says_so() -> None:
    assert "Near misses were not recorded" in str(
        Report(Record("cpu", "llama", [GraphRecord("decode")]), recorded=False)
    )


def json_types(data: object) -> object:
    if isinstance(data, dict):
        return {k: json_types(v) for k, v in data.items()}
    return [json_types(v) for v in data[:1]] if isinstance(data, list) else type(data).__name__


def test_json_fields(told: Report) -> None:
    data = told.json()
    costs = {
        "bytes_saved": "int", "bytes_before": "int", "bytes_after": "int", "unfused_us": "float",
        "predicted_us": "float", "measured_us": {}, "weight_error": "NoneType", "lowered": "str",
        "lowered_why": "str", "nodes": "int",
    }  # fmt: skip
    assert json_types(data["graphs"]) == [{
        "name": "str", "nodes_before": "int", "nodes_after": "int", "capture_ms": "float", "rewrite_ms": "float",
        "compile_ms": "float", "dynamic": "bool", "grad": "bool", "from_disk": "bool", "fallback": "NoneType",
        "repeated": [], "repeat_failed": "NoneType", "one_function": "NoneType",
        "stages": [{"name": "str", "rewrites": "int", "ms": "float"}],
    }]  # fmt: skip
    by_id = {r["id"]: r for r in data["rules"]}
    assert list(by_id) == ["fuse/swiglu", "fuse/rope", "attention/gqa", "fuse/rms_norm", "fold/conv_bn",
                           "fuse/late", "fuse/quiet", "fuse/geglu"]  # fmt: skip
    assert json_types(by_id["fuse/swiglu"]["sites"]) == [{
        "module": "str", "source": "str", "key": "str", **costs,
        "graphs": {"decode": {"node": "str", **costs}, "prefill": {"node": "str", **costs}},
    }]  # fmt: skip
    assert json_types(by_id["attention/gqa"]["missed"]) == [{
        "module": "str", "source": "str", "reason": "str", "condition": "str", "explanation": "str",
        "expected": "str", "found": "str", "matched": "int", "of": "int", "node": "str", "graphs": ["str"],
        "near": "bool", "taken_by": "NoneType",
    }]  # fmt: skip
    assert json_types(data["effective"]) == [{"asked": "str", "got": "str", "reason": "str"}]
    assert (data["target"], data["recipe"]) == ("h100", "llama,int4")


def test_json_values(told: Report) -> None:
    by_id = {r["id"]: r for r in told.json()["rules"]}
    rule = by_id["fuse/swiglu"]
    assert rule["fired"] == len(rule["sites"]) == 2
    first = rule["sites"][0]
    assert first["module"] == "model.layers.0.mlp"
    assert first["source"].endswith("transformers/models/llama/modeling_llama.py:155")
    assert first["bytes_saved"] == first["graphs"]["decode"]["bytes_saved"] == 1000
    assert first["graphs"]["prefill"]["bytes_saved"] == 512000
    assert first["lowered"] == "cpp"
    assert by_id["fuse/geglu"]["excluded"] == "it is slower here"
    assert (by_id["fuse/quiet"]["fired"], by_id["fuse/quiet"]["missed"]) == (0, [])


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        ("fuse/geglu", "The recipe llama,int4 leaves it out: it is slower here."),
        ("fuse/rope", "It fired at 4 sites. Nowhere else did it start to fit."),
        ("fold/conv_bn", "its pattern needs aten.conv2d, which no graph has."),
        (
            "fuse/late",
            "It fired nowhere. At 2 places its pattern fits, but the nodes went to fuse/swiglu (2).",
        ),
        (
            "attention/gqa",
            "closest at 2 places, where the whole pattern fits; stopped by condition: D % 64 == 0 (the kernel",
        ),
        ("fuse/quiet", "nowhere did more than the first op of its pattern fit"),
    ],
)
def test_why_not_decides(told: Report, rule: str, part: str) -> None:
    assert part in told.why_not(rule).verdict


def test_why_not_names_the_rule_that_should_have_come_before(told: Report) -> None:
    told.makes = {"aten.conv2d": ["fuse/quiet", "fuse/rope"]}
    said = "aten.conv2d is what fuse/quiet would put there, and that fired nowhere either."
    assert said in told.why_not("fold/conv_bn").verdict


def test_why_not_shows_the_condition_and_the_line(told: Report) -> None:
    text = str(told.why_not("attention/gqa"))
    for part in ("model.layers.{0,1}.self_attn", "D % 64 == 0 — the kernel loads whole vectors",
                 "found D = 80", "transformers/models/llama/modeling_llama.py:98"):  # fmt: skip
        assert part in text
    assert "fuse/rms_norm" not in text


def test_why_not_of_a_fallback() -> None:
    lost = Record(
        "cpu", "llama", [GraphRecord("decode", fallback="an autocast region inside the graph")]
    )
    told = Report(lost, dict(RULES))
    assert "No graph was rewritten: an autocast region" in told.why_not("fuse/rope").verdict


def test_why_not_as_json(told: Report) -> None:
    data = told.why_not("attention/gqa").json()
    assert (data["rule"], data["fired"], len(data["missed"])) == ("attention/gqa", 0, 2)


def test_an_unknown_rule_gets_the_nearest_name(told: Report) -> None:
    with pytest.raises(SpecError, match=r"did you mean `fuse/swiglu`\?"):
        told.why_not("fuse/swiglo")
