from __future__ import annotations

from sitsopt.measure.compiletime import measure


def test_compile_times_are_measured_by_depth_and_by_number_of_rules() -> None:
    result = measure(layers=(2, 3), more=10, rounds=1)
    two, three = result["graphs"][2], result["graphs"][3]
    assert three["nodes"] > two["nodes"] > 100 and three["rewrites"] > two["rewrites"]
    assert result["more_rules"] == 10
    assert result["growth"] == three["rewrite_ms"] / two["rewrite_ms"]
    assert result["extra"] == result["rewrite_more_ms"] / two["rewrite_ms"] - 1
    assert two["capture_ms"] > 0 < two["rewrite_ms"]
