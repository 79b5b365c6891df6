"""Kernel descriptions and their C++ text: no torch, no compiler, a fraction of a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sitsopt.emit.cpp import kernel_text, ops_text
from sitsopt.emit.kernel import ISAS, Attention, Linear, Packed, best_isa

FLAGS_OF_A_ZEN_4 = {
    "avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16",
    "avx512_vnni", "avx512vbmi",
}  # fmt: skip


def test_the_best_instruction_set_is_the_widest_that_fits():
    assert best_isa(FLAGS_OF_A_ZEN_4).name == "avx512_vbmi"
    assert best_isa(FLAGS_OF_A_ZEN_4 - {"avx512vbmi"}).name == "avx512_bf16"
    assert best_isa(FLAGS_OF_A_ZEN_4 - {"avx512_bf16"}).name == "avx512_vnni"
    assert best_isa(FLAGS_OF_A_ZEN_4 - {"avx512_bf16", "avx512_vnni"}).name == "avx512"
    assert best_isa(FLAGS_OF_A_ZEN_4 - {"avx512dq"}).name == "avx2"
    assert best_isa(FLAGS_OF_A_ZEN_4 - {"f16c"}).name == "generic"
    assert best_isa([]).name == "generic"


def test_descriptions_are_keys():
    one = Attention("avx2", "bf16", 64, 64)
    assert one == Attention("avx2", "bf16", 64, 64) and hash(one) == hash(
        Attention("avx2", "bf16", 64, 64)
    )
    assert one.symbol == "sits_attention_bf16_64_64" and one.family == "attention"
    assert Linear("generic", "f16").symbol == "sits_linear_f16"
    assert Packed("avx2", "bf16", "int4", 64, True).symbol == "sits_packed_bf16_int4_64_low"
    assert Packed("avx2", "f32", "int8", inputs="int8").symbol == "sits_packed_f32_int8_x_int8"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_text_holds_the_description(isa, dtype):
    text = kernel_text(Attention(isa, dtype, 80, 96))
    for line in (f"#define W {ISAS[isa].lanes}", "#define HD 80", "#define VD 96"):
        assert line in text
    assert (
        f"#define SYMBOL sits_attention_{dtype}_80_96" in text
        and text.count('extern "C" int SYMBOL') == 1
    )
    assert f"#define PROBE_SYMBOL sits_linear_{dtype}_probe" in kernel_text(Linear(isa, dtype))


@pytest.mark.parametrize(
    "group, step", [(0, 64), (8, 8), (24, 24), (64, 64), (80, 40), (96, 48), (128, 64)]
)
def test_a_step_divides_its_group(group, step):
    text = kernel_text(Packed("avx512_vbmi", "bf16", "int4", group, True))
    assert f"#define STEP {step}\n" in text and f"#define GROUP {group or 64}\n" in text


def test_kernels_see_no_header_of_torch():
    """That is what keeps their compilation at two seconds; the one unit that needs them is the same for all."""
    for kernel in (Attention("avx512", "f32", 64, 64), Linear("avx512", "f32")):
        assert "ATen" not in kernel_text(kernel) and "torch" not in kernel_text(kernel)
    assert ops_text() == ops_text() and "TORCH_LIBRARY_FRAGMENT(sits_cpp" in ops_text()


def test_both_sides_share_the_structs():
    for kernel, struct in [
        (Attention("avx2", "f32", 8, 8), "struct SitsAttention"),
        (Linear("avx2", "f32"), "struct SitsLinear {"),
    ]:
        ours, theirs = (
            t[t.index(struct) :].split("};")[0] for t in (kernel_text(kernel), ops_text())
        )
        assert ours == theirs


def test_torch_stays_out():
    text = "import sys, sitsopt.emit.cpp; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text]).returncode == 0
