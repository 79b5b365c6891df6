"""Skinny linears over quantized weights against f64, and the layout against what it stands for."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from sitsopt.graph.packed import Layout, error_of, nearest, pack, round_inputs, unpack
from sitsopt.runtime import kernels
from sitsopt.runtime.kernels import toolchain
from tests.kernels.harness import BF16, F16, F32, INF, UNIT, needs_kernels, randn

# scheme, group, low, per, inputs
INT8, INT8_LOW, INT8_X = (
    ("int8", 0, False, "", ""),
    ("int8", 0, True, "", ""),
    ("int8", 0, False, "", "int8"),
)
INT4, INT4_LOW, INT4_ROW = (
    ("int4", 32, False, "", ""),
    ("int4", 64, True, "", ""),
    ("int4", 0, False, "", ""),
)
INT4_X = ("int4", 128, True, "", "int8")
FP8, FP8_TENSOR, FP8_BLOCK = ("fp8", 0, False, "row", ""), ("fp8", 0, False, "tensor", ""), ("fp8", 128, False, "block", "")  # fmt: skip
SCHEMES = [INT8, INT8_LOW, INT8_X, INT4, INT4_LOW, INT4_ROW, INT4_X, FP8, FP8_TENSOR, FP8_BLOCK]
KERNELS = [
    *[(BF16, s) for s in SCHEMES if s not in (FP8_TENSOR, INT4_ROW)],
    *[(F32, s) for s in (INT8, INT4_LOW, FP8)],
    (F16, INT4),
]


def op_for(dtype, scheme):
    s, group, low, _, inputs = scheme
    facts = {"scheme": s, "group": group, "low": low, "inputs": inputs}
    return kernels.lookup("packed_linears", dtype=dtype, **facts)


def check_packed(x, weights, scheme, biases=None):
    """Runs the op and compares it with the dequantized weights in f64: within the rounding of the output, of
    activations to 15 bits of the largest in 64, and of sums in f32."""
    s, group, low, per, inputs = scheme
    layout = Layout(s, group, low)
    biases = biases or [None] * len(weights)
    packed = [pack(w, s, group, low, per) for w in weights]
    rows = [len(w) for w in weights]
    outs = op_for(x.dtype, scheme)(x, packed, biases, rows, s, group, low, inputs)
    wide = round_inputs(x.float(), layout).double() if inputs else x.double()
    for out, p, b, n in zip(outs, packed, biases, rows, strict=True):
        plain = unpack(p, n, x.shape[-1], layout).double()
        exact = F.linear(wide, plain, None if b is None else b.double())
        assert out.shape == exact.shape and out.dtype == x.dtype and out.is_contiguous()
        assert torch.equal(out.isnan(), exact.isnan()), "NaN in other places than the exact result"
        finite = exact.isfinite()
        assert torch.equal(out[~finite].double().nan_to_num(7.0), exact[~finite].nan_to_num(7.0))
        if not finite.any():
            continue
        added = F.linear(wide.abs(), plain.abs())  # what was summed
        added = added[added.isfinite()].max().item() + (0.0 if b is None else b.abs().max().item())
        many = (
            x.numel() > 16 * x.shape[-1]
        )  # then the plain weights are rounded, and summed as ATen does
        slack = {F32: 1e-6}.get(x.dtype, 2.0**-14) + (UNIT[x.dtype] if many or inputs else 0.0)
        bound = 4 * UNIT[x.dtype] * exact[finite].abs().max().item() + slack * added
        error = (out.double() - exact)[finite].abs().max().item()
        assert error <= bound + 1e-37, f"error {error:.3g} over {bound:.3g}"
    return outs


@needs_kernels
@pytest.mark.parametrize("dtype, scheme", KERNELS, ids=str)
def test_shapes(dtype, scheme):
    for rows, k, n in itertools.product([1, 2, 5, 8, 9, 16, 17], [1, 70, 256], [1, 33]):
        weights = [randn(n, k) * 0.1, randn(n + 3, k, seed=4)]
        check_packed(
            randn(rows, k, dtype=dtype), weights, scheme, [None, randn(n + 3, dtype=dtype)]
        )
    check_packed(randn(2, 1, 4096, dtype=dtype), [randn(20, 4096)], scheme)


@needs_kernels
@pytest.mark.parametrize("dtype, scheme", [(BF16, INT8), (BF16, INT4_LOW), (BF16, FP8), (F32, INT4_LOW)], ids=str)  # fmt: skip
def test_values(dtype, scheme):
    """Special activations stay where they are; outliers, zeros and denormals lose nothing else."""
    w = randn(33, 70)
    for value in (INF, -INF, float("nan"), 1e-39, 1e35):
        for rows in (1, 3):
            x = randn(rows, 70, dtype=dtype)
            x[0, 3] = value
            check_packed(x, [w], scheme)
    assert not check_packed(torch.zeros(2, 70, dtype=dtype), [w], scheme)[0].any()
    strided = randn(3, 140, dtype=dtype)[:, ::2]
    check_packed(strided, [w], scheme)
    assert check_packed(randn(0, 70, dtype=dtype), [w], scheme)[0].shape == (0, 33)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_that_are_hard_to_round(scheme):
    s, group, low, per, _ = scheme
    layout = Layout(s, group, low)
    hard = {
        "zeros": torch.zeros(17, 70),
        "constant": torch.full((17, 70), 0.3),
        "one sign": randn(17, 70).abs() + 2,
        "negative": -randn(17, 70).abs() - 1e-3,
        "outlier": torch.where(torch.arange(70) == 5, 1e4, randn(17, 70)),
        "huge": randn(17, 70) * 1e35,
        "tiny": randn(17, 70) * 1e-30,
        "one": torch.tensor([[-0.7]]),
    }
    worst = {"int8": 0.02, "int4": 0.45, "fp8": 0.05}[s]
    for name, w in hard.items():
        packed = pack(w, s, group, low, per)
        plain = unpack(packed, *w.shape, layout)
        error = ((plain - w).double().norm() / w.double().norm().clamp(min=1e-300)).item()
        assert error_of(packed) == pytest.approx(error, abs=1e-6)
        assert torch.equal(plain, nearest(w, s, group, low, per)), name
        assert error <= worst and plain.isfinite().all(), f"{name}: {error:.3g}"
        if name == "zeros" or (low and name in ("constant", "one") and s == "int4"):
            assert torch.allclose(plain, w, rtol=1e-3), name
    w = randn(17, 70)
    w[3, 7] = float("nan")
    if per in ("", "row"):  # a row of its own scale spoils no other
        plain = nearest(w, s, group, low, per)
        assert plain[3].isnan().any() and plain[[0, 1, 2, 4]].isfinite().all()


def test_layout_sizes():
    assert Layout("int8").bits(4096, 4096) == pytest.approx(8, abs=0.01)
    assert Layout("int4", 64, True).bits(4096, 4096) == pytest.approx(4.5, abs=0.01)
    assert pack(randn(40, 70), "int4", 32, False, "").shape == (
        3,
        Layout("int4", 32).unit_bytes(70),
    )


@needs_kernels
def test_what_no_kernel_takes_is_the_reference():
    s, group, low, per, inputs = INT8
    w, x = randn(8, 16), randn(2, 16)
    packed = pack(w, s, group, low, per)
    op = op_for(F32, INT8)
    plain = unpack(packed, 8, 16, Layout(s))
    wide = op(x.double(), [packed], [None], [8], s, group, low, inputs)[0]
    assert wide.dtype == torch.float64 and torch.equal(wide, F.linear(x.double(), plain.double()))
    with pytest.raises(RuntimeError, match="differ in number"):
        op(x, [packed], [], [8], s, group, low, inputs)


@needs_kernels
def test_a_stamp_changes_with_the_tensor():
    a, b = randn(40, 40), randn(3)
    stamp = torch.ops.sits_cpp.stamp
    first = stamp([a, b])
    assert stamp([a, b]) == first != stamp([a.clone(), b])
    a.data.mul_(2)
    assert stamp([a, b]) != first
    first = stamp([a, b])
    a[1, 1] = 7.0  # a version more
    assert stamp([a, b]) != first


@needs_kernels
@pytest.mark.parametrize("name", ["avx512_bf16", "avx512_vnni", "avx2", "generic"])
def test_other_instruction_sets(name, monkeypatch):
    """The same text for machines that can do less, run on this one."""
    cases = [(BF16, INT8), (BF16, FP8_BLOCK)] if name.startswith("avx512") else [(BF16, INT4_LOW)]
    monkeypatch.setenv("SITSOPT_ISA", name)
    try:
        toolchain.machine_isa()
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    try:
        for dtype, scheme in cases:
            for rows, k in [(1, 33), (3, 130), (11, 64), (40, 257)]:
                check_packed(randn(rows, k, dtype=dtype), [randn(21, k)], scheme)
    finally:
        monkeypatch.delenv("SITSOPT_ISA")
        for dtype, scheme in cases:
            op_for(dtype, scheme)  # the machine's own again
