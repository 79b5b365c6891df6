"""The cost model: bytes over bandwidth, operations over peak, and launches, in microseconds."""

import pytest
import sympy

from sitsopt.rewrite.cost import (
    Work,
    bytes_of,
    expression_us,
    linear_flops,
    predict_us,
    saved_us,
    serial_us,
)
from sitsopt.spec.target import load_target

H200 = load_target("h200")  # 4800 GB/s, 989.4 bf16 TFLOPS, 1.3 us
N = sympy.Symbol("n", positive=True, integer=True)


def test_bytes():
    assert bytes_of([2, 3, 4], 2) == 48
    assert bytes_of([], 4) == 4
    assert bytes_of([4096, 4096], 0.5) == 4096 * 4096 // 2
    assert isinstance(bytes_of([4, 4], 0.5), int)
    assert bytes_of([3], 0.5) == 1.5
    assert bytes_of([N, 8], 2) == 16 * N
    assert bytes_of([0, 8], 2) == 0


def test_bound_by_memory():
    work = Work(bytes=bytes_of([4096, 4096], 2), flops=linear_flops(1, 4096, 4096), dtype="bf16")
    assert predict_us(work, H200) == pytest.approx(4096 * 4096 * 2 / 4800e9 * 1e6)


def test_bound_by_arithmetic():
    work = Work(bytes=1000, flops=linear_flops(4096, 4096, 4096), dtype="bf16")
    assert predict_us(work, H200) == pytest.approx(2 * 4096**3 / 989.4e12 * 1e6)


def test_launches_are_added():
    assert predict_us(Work(bytes=4_800_000, launches=3), H200) == pytest.approx(1.0 + 3 * 1.3)
    assert predict_us(Work(), H200) == 0.0


def test_symbols_stay_until_they_are_given():
    work = Work(bytes=bytes_of([N, 4800], 1), flops=linear_flops(N, 2, 2), launches=1, dtype="f32")
    expression = expression_us(work, H200)
    assert expression.free_symbols == {N}
    assert predict_us(work, H200) is None
    assert predict_us(work, H200, {"n": 1000}) == pytest.approx(1.0 + 1.3)
    assert float(expression.subs({N: 1000})) == pytest.approx(2.3)


def test_a_symbolic_int_is_read_without_a_guard():
    class Node:
        expr = N * 2

    class SymInt:
        node = Node()

        def __int__(self):
            raise AssertionError("a guard")

        __bool__ = __index__ = __mul__ = __rmul__ = __int__

    assert bytes_of([SymInt(), 4], 2) == 16 * N
    assert predict_us(Work(bytes=SymInt()), H200, {"n": 2_400_000}) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("target", "work"),
    [
        ("cuda", Work(bytes=1)),
        ("mi300x", Work(bytes=1, launches=1)),
        ("a100", Work(flops=1, dtype="f8e4m3")),
        ("h200", Work(flops=1, dtype="i64")),
        ("cpu", Work(bytes=1)),
    ],
)
def test_what_is_unknown_is_none(target, work):
    assert predict_us(work, load_target(target)) is None
    assert expression_us(work, load_target(target)) is None


def test_the_arithmetic_of_a_cpu_counts_as_free():
    cpu = load_target("cpu")
    cpu = cpu.with_facts(memory=cpu.memory.model_copy(update={"bandwidth_gbs": 30.0}))
    assert predict_us(Work(bytes=30_000, flops=10**12), cpu) == pytest.approx(1.0)


def test_sums_and_differences():
    one, two = Work(bytes=4_800_000), Work(bytes=9_600_000)
    assert serial_us([one, two], H200) == pytest.approx(3.0)
    assert serial_us([], H200) == 0.0
    assert serial_us([one, Work(bytes=N)], H200) is None
    assert saved_us(two, one, H200) == pytest.approx(1.0)
    assert saved_us(two, Work(bytes=N), H200) is None


def test_text_is_no_size():
    with pytest.raises((TypeError, AttributeError, sympy.SympifyError)):
        predict_us(Work(bytes="__import__('os')"), H200)
