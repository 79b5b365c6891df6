"""Fused pointwise kernels in the interpreter against f64."""

from __future__ import annotations

import pytest
import torch

from sitsopt.emit.expr import Const, Elementwise, Expr, Input, Operand, Scalar, apply
from sitsopt.emit.triton import elementwise
from tests.triton.harness import DTYPES, close, hard_values, launch, poisoned

g, u = Input("g"), Input("u")
SWIGLU = apply("mul", apply("silu", g), u)


def run(kernel: Elementwise, shape: tuple[int, ...], inputs: list[torch.Tensor], *scalars: float):
    """Outputs of a kernel whose every `?` stride is read off its tensor."""
    source = elementwise.source(kernel)
    outs = [poisoned(*shape, dtype=DTYPES.get(o.dtype, torch.bool)) for o, _ in kernel.outputs]
    args: list[object] = [*inputs, *outs, *scalars]
    if kernel.dense:
        args.append(torch.Size(shape).numel())
    else:
        args += shape
        for operand, tensor in zip(kernel.operands, [*inputs, *outs], strict=True):
            full = tensor.expand(shape)
            args += [full.stride(i) for i, kind in enumerate(operand.strides) if kind == "?"]
    launch(source, elementwise.grid(kernel, source, shape), *args)
    return outs


def binary(expr: Expr, dtype: str, strides: str = "", rank: int = 2) -> Elementwise:
    return Elementwise(
        "kernel",
        rank,
        (Operand("g", dtype, strides), Operand("u", dtype, strides)),
        ((Operand("y", dtype), expr),),
    )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 37), (3, 1024), (0, 5), (5, 1031)])
def test_dense(dtype: str, shape: tuple[int, int]) -> None:
    a, b = hard_values(*shape, dtype=dtype), hard_values(*shape, dtype=dtype, seed=1)
    (y,) = run(binary(SWIGLU, dtype), shape, [a, b])
    close(y, torch.nn.functional.silu(a.double()) * b.double(), dtype)


@pytest.mark.parametrize("shape", [(1, 1), (6, 37), (13, 300)])
def test_halves_of_one_tensor(shape: tuple[int, int]) -> None:
    both = hard_values(shape[0], 2 * shape[1], dtype="f16")
    a, b = both[:, : shape[1]], both[:, shape[1] :]
    (y,) = run(binary(SWIGLU, "f16", "?1"), shape, [a, b])
    close(y, torch.nn.functional.silu(a.double()) * b.double(), "f16")


def test_broadcast_permuted_and_mixed() -> None:
    shape = (3, 5, 4, 33)
    x = hard_values(3, 4, 5, 33, dtype="bf16").transpose(1, 2)
    bias = hard_values(33, dtype="f32", seed=3)
    gate = torch.rand(3, 1, 1, 1).to(torch.float16)
    keep = torch.rand(5, 4, 33) > 0.3
    total = apply("add", Input("x"), Input("bias"))
    kernel = Elementwise(
        "mixed",
        4,
        (
            Operand("x", "bf16", "???1"),
            Operand("bias", "f32", "0001"),
            Operand("gate", "f16", "?000"),
            Operand("keep", "i1", "0??1"),
        ),
        (
            (Operand("y", "f32"), total),
            (
                Operand("z", "bf16"),
                apply("where", Input("keep"), apply("mul", total, Input("gate")), 0),
            ),
            (Operand("big", "i1"), apply("lt", Const(0.5), total)),
        ),
    )
    y, z, big = run(kernel, shape, [x, bias, gate, keep])
    want = x.double() + bias.double()
    close(y, want, "f32")
    close(z, torch.where(keep, want * gate.double(), 0.0), "bf16")
    assert torch.equal(big, want.float() > 0.5)


UNARY = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu, "relu": torch.relu, "log": torch.log,
    "gelu": torch.nn.functional.gelu, "erf": torch.erf, "floor": torch.floor,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str) -> None:
    special = [
        0.0,
        -0.0,
        1e-6,
        -1e-3,
        0.19,
        0.21,
        5.0,
        -5.0,
        90.0,
        -90.0,
        *map(float, ("inf", "-inf", "nan")),
    ]
    x = torch.tensor(special + torch.randn(51).tolist())
    if op in ("sin", "cos"):
        x = x[x.isfinite()]
    kernel = Elementwise(
        op, 1, (Operand("x", "f32"),), ((Operand("y", "f32"), apply(op, Input("x"))),)
    )
    (y,) = run(kernel, tuple(x.shape), [x])
    want = UNARY[op](x.double())
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y[want.isinf()].double(), want[want.isinf()])
    fine = want.isfinite() & (want.abs() < 3e38)
    error = (y.double() - want).abs()[fine]
    # Written with +-1 beside a small value, these lose absolute, not relative, accuracy in the tails.
    floor = 4e-6 if op in ("gelu", "gelu_tanh", "erf", "cos", "sin") else 1e-37
    assert (error <= 4e-6 * want.abs()[fine] + floor).all(), error.max()


def test_scalars_and_casts() -> None:
    x = hard_values(65, dtype="f32")
    expr = apply("mul", apply("cast:bf16", Input("x")), Scalar("s"))
    kernel = Elementwise(
        "scaled", 1, (Operand("x", "f32"),), ((Operand("y", "f32"), expr),), ("s",)
    )
    (y,) = run(kernel, (65,), [x], 0.3)
    assert torch.equal(y, x.bfloat16().float() * torch.tensor(0.3))


def test_equal_parts_are_computed_once() -> None:
    kernel = binary(apply("add", SWIGLU, SWIGLU), "f32")
    assert elementwise.source(kernel).text.count("tl.exp") == 1


def test_unknown_operation() -> None:
    with pytest.raises(ValueError, match="no pointwise operation 'sine'"):
        apply("sine", g)
    with pytest.raises(ValueError, match="add takes 2 arguments, not 1"):
        apply("add", g)
