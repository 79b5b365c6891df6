"""Generated texts against the ones on record: a change of a generator shows what it changes.

UPDATE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sitsopt.emit.triton.manifest import entries

GOLDEN = Path(__file__).parent / "golden"
KEPT = (
    "swiglu_halves_bf16", "rms_norm_bf16_4096_i8", "add_rms_norm_bf16_4096", "layer_norm_f32_20480_bias_f32",
    "softmax_bf16_1024", "rope_half_bf16_64", "attention_decode_bf16_128_g4_kv_i4_mass",
    "attention_decode_bf16_128_g4_page16", "attention_prefill_bf16_64_g4_causal",
    "attention_merge_f16_80_g1_sinks", "matmul_skinny_bf16_14336x4096_w_i4_64_norm_gated_silu",
    "matmul_wide_bf16_4096x4096_w_f8e4m3_128", "cache_append_bf16_64x64",
    "cache_commit_bf16_64x64_i4_rope", "argmax_bf16", "draw_f32",
)  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {entry.name: entry.source.text for entry in entries("sm_80")}


@pytest.mark.parametrize("name", KEPT)
def test_text(name: str, texts: dict[str, str]) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(texts[name])
    assert path.read_text() == texts[name], "UPDATE_GOLDEN=1 writes the golden texts anew"


def test_nothing_else_is_kept() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(KEPT)


def test_every_text_is_python(texts: dict[str, str]) -> None:
    for name, text in texts.items():
        compile(text, name, "exec")
        assert text.count("@triton.jit") == 1
        assert max(map(len, text.splitlines())) < 300
