"""What there is, what there is not, and the reason; the answers without computing; instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from sitsopt.runtime import kernels
from sitsopt.runtime.kernels import load, toolchain
from tests.kernels.harness import BF16, DTYPES, F16, F32, check_attention, needs_kernels, randn
from tests.kernels.test_linear import check_linears

pytestmark = needs_kernels


def test_lookup_gives_the_overload():
    op = kernels.lookup("attention", dtype=BF16, head_dim=64, q_rows=1)
    assert op is torch.ops.sits_cpp.attention.default
    assert kernels.lookup("linears", dtype=F32) is torch.ops.sits_cpp.linears.default
    assert kernels.lookup("gated", dtype=F32, rows=16) is torch.ops.sits_cpp.gated.default
    assert kernels.why_not("linears", dtype=F32) == ""
    assert kernels.availability() == (True, f"built for {toolchain.machine_isa().name}")


@pytest.mark.parametrize(
    "op, facts, reason",
    [
        ("conv", {"dtype": F32}, "no kernel is called conv"),
        ("attention", {"dtype": torch.float64, "head_dim": 64}, "not in float64"),
        ("attention", {"dtype": F32}, "needs head_dim"),
        ("attention", {"dtype": F32, "head_dim": 0}, "head_dim 0 is outside 1 to 512"),
        ("attention", {"dtype": F32, "head_dim": 64, "value_dim": 513}, "value_dim 513 is outside"),
        ("attention", {"dtype": F32, "head_dim": 64, "device": "meta"}, "on meta"),
        ("linears", {"dtype": F32, "rows": 17}, "17 rows are a matrix product"),
        ("gated", {"dtype": torch.int8}, "not in int8"),
    ],
)
def test_why_not(op, facts, reason):
    assert kernels.lookup(op, **facts) is None
    assert reason in kernels.why_not(op, **facts)


def test_amx_multiplies_wide_bf16_better(monkeypatch):
    monkeypatch.setattr(load, "cpu_flags", lambda: frozenset({"amx_bf16"}))
    assert load.most_query_rows("bf16") == 16 and load.most_query_rows("f32") > 10**6
    assert "20 rows" in kernels.why_not("attention", dtype=BF16, head_dim=64, q_rows=20)


def test_without_a_compiler_there_is_a_reason(tmp_path):
    """And no crash: a fresh process, as this one has its kernels."""
    text = """
import torch
from sitsopt.runtime import kernels
print(kernels.availability())
print(kernels.lookup("attention", dtype=torch.float32, head_dim=64))
print(kernels.why_not("linears", dtype=torch.float32))
"""
    env = {**os.environ, "CXX": "/nonexistent", "SITSOPT_CACHE": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", text], env=env, capture_output=True, text=True, check=True
    )
    reason = "CXX=/nonexistent is not a program; unset CXX or name a C++ compiler"
    assert out.stdout.splitlines() == [f"(False, '{reason}')", "None", reason]


def turned(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("T", [1, 5, 30])
@pytest.mark.parametrize("Dv", [64, 32])
def test_fake_attention_has_the_real_layout(T, Dv):
    op = kernels.lookup("attention", dtype=BF16, head_dim=64, value_dim=Dv)
    q, k, v = (
        randn(2, 6, T, 64, dtype=BF16),
        randn(2, 2, 9, 64, dtype=BF16),
        randn(2, 2, 9, Dv, dtype=BF16),
    )
    for q1 in (
        q,
        turned(q),
        q.mT.contiguous().mT,
        torch.cat([q, q], -1)[..., :64],
        q[:1].expand(2, -1, -1, -1),
    ):
        real = op(q1, k, v, None, 0.1)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = op(*(mode.from_tensor(t) for t in (q1, k, v)), None, 0.1)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("rows", [1, 30])
def test_fake_linears_have_the_real_layout(rows):
    x, w, b = randn(1, rows, 16), randn(24, 16), randn(24)
    for op, args in [("linears", ([w, w], [b, None])), ("gated", (w, w, b, None, "silu"))]:
        call = kernels.lookup(op, dtype=F32)
        real = call(x, *args)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = call(mode.from_tensor(x), *args)
        for f, r in zip(*((o if isinstance(o, list) else [o]) for o in (fake, real)), strict=True):
            assert (f.shape, f.stride(), f.dtype) == (r.shape, r.stride(), r.dtype)


def test_compiled_by_inductor():
    op, linears = (
        kernels.lookup("attention", dtype=F32, head_dim=16),
        kernels.lookup("linears", dtype=F32),
    )

    def layer(x, wq, wk, k, v):
        q, extra = linears(x, [wq, wk], [None, None])
        q = (q * 2).view(1, 3, 4, 16).transpose(1, 2)
        return op(q, k, v, None, 0.25, True).transpose(1, 2).reshape(1, 3, 64) + extra

    args = (
        randn(1, 3, 8),
        randn(64, 8),
        randn(64, 8, seed=1),
        randn(1, 2, 9, 16),
        randn(1, 2, 9, 16),
    )
    assert torch.allclose(torch.compile(layer, fullgraph=True)(*args), layer(*args), atol=1e-5)


LESSER = [
    ("avx512", BF16),
    ("avx2", BF16),
    ("avx2", F16),
    ("avx2", F32),
    ("generic", BF16),
    ("generic", F16),
]


@pytest.mark.parametrize("name, dtype", LESSER)
def test_other_instruction_sets(name, dtype, monkeypatch):
    """The same text for narrower vectors, run on this machine."""
    monkeypatch.setenv("SITSOPT_ISA", name)
    try:
        toolchain.machine_isa()
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    try:
        for T, S in [(1, 130), (5, 67), (20, 20)]:
            q, k, v = (randn(2, h, n, 36, dtype=dtype) for h, n in ((6, T), (2, S), (2, S)))
            check_attention(q, k, v, randn(2, 1, T, S) > -1)
            check_attention(q, k, v, causal=True, softcap=3.0)
        for rows, K in [(1, 33), (1, 4096), (3, 100), (11, 64), (16, 257)]:
            check_linears(
                randn(rows, K, dtype=dtype), [randn(21, K, dtype=dtype)], [randn(21, dtype=dtype)]
            )
    finally:
        monkeypatch.delenv("SITSOPT_ISA")
        kernels.lookup("attention", dtype=dtype, head_dim=36)  # the machine's own again
        kernels.lookup("linears", dtype=dtype)


def test_unknown_instruction_set(monkeypatch):
    monkeypatch.setenv("SITSOPT_ISA", "avx9")
    with pytest.raises(
        toolchain.BuildError, match="SITSOPT_ISA=avx9 is unknown; known: avx512_vbmi,"
    ):
        toolchain.machine_isa()


def test_halves_convert_exactly_without_hardware(monkeypatch):
    """Every f16 value through the generic text: read as a bias, and rounded back."""
    monkeypatch.setenv("SITSOPT_ISA", "generic")
    try:
        op = kernels.lookup("linears", dtype=F16)
        every = torch.arange(65536).to(torch.uint16).view(F16)
        out = op(torch.zeros(1, 1, dtype=F16), [torch.zeros(65536, 1, dtype=F16)], [every])[0][0]
        assert torch.equal(out.isnan(), every.isnan())
        assert torch.equal(out[~out.isnan()] + 0, every[~every.isnan()] + 0)
        between = (torch.randn(60000) * torch.exp2(torch.randint(-26, 17, (60000,)))).to(F16)
        x = torch.full((1, 1), 0.7, dtype=F16)
        ours = op(x, [between[:, None]], [None])[0][0]
        assert torch.equal(ours, (between.float() * x.float()[0]).to(F16))
    finally:
        monkeypatch.delenv("SITSOPT_ISA")
        kernels.lookup("linears", dtype=F16)


def test_dtypes_are_known_by_the_same_names():
    assert list(load.DTYPE_NAMES) == DTYPES
