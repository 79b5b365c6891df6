"""Every kind of caller: functions, methods, breaks in the graph, threads, copies, and values of every kind."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.backend.support import ConvNet, Mlp, fired, graphs, raised, sits
from tests.cases.harness import differences, sharing

silu = nn.functional.silu
X, Y = torch.randn(3, 16), torch.randn(3, 16)


# -- what is compiled ------------------------------------------------------------------------------------


def gate(x, y):
    return silu(x) * y


class Callable_:
    def __call__(self, x, y):
        return silu(x) * y

    def method(self, x, y):
        return silu(x) * y

    @staticmethod
    def static(x, y):
        return silu(x) * y

    @classmethod
    def of_class(cls, x, y):
        return silu(x) * y


def closure(factor):
    def inner(x, y):
        return silu(x) * y * factor

    return inner


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "function": gate, "lambda": lambda x, y: silu(x) * y, "partial": functools.partial(gate, y=Y),
    "method": Callable_().method, "static": Callable_.static, "of class": Callable_.of_class,
    "closure": closure(2.0), "closure over a tensor": closure(torch.tensor(2.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_are_no_modules(name: str) -> None:
    fn = FUNCTIONS[name]
    args = (X,) if name == "partial" else (X, Y)
    torch.testing.assert_close(sits(fn)(*args), fn(*args))


def test_as_a_decorator() -> None:
    @torch.compile(backend="sits", options={"lowering": "eager"})
    def f(x, y):
        return silu(x) * y

    torch.testing.assert_close(f(X, Y), gate(X, Y))


def test_the_methods_compile_and_forward() -> None:
    model = Mlp()
    wanted = model(X)
    model.compile(backend="sits", options={"lowering": "eager"})
    torch.testing.assert_close(model(X), wanted)
    assert fired(model)
    torch._dynamo.reset()  # it would take the code compiled for the first one
    other = Mlp()
    other.load_state_dict(model.state_dict())
    other.forward = sits(other.forward)
    torch.testing.assert_close(other(X), wanted)
    assert fired(other)


def test_a_part_of_a_model() -> None:
    model = nn.Sequential(Mlp(), Mlp())
    wanted = model(X)
    model[1] = sits(model[1])
    torch.testing.assert_close(model(X), wanted)
    assert fired(model)


def test_twice() -> None:
    model = Mlp()
    run = sits(sits(model))
    torch.testing.assert_close(run(X), model(X))
    torch.testing.assert_close(sits(model)(X), model(X))


def test_two_settings_for_one_model() -> None:
    model = Mlp()
    with torch.no_grad():
        a = sits(model)(X)
        b = sits(model, exclude=[s.key for g in graphs(model) for s in g.sites])(X)
    torch.testing.assert_close(a, model(X))
    torch.testing.assert_close(b, model(X))


def test_compiled_inside_compiled() -> None:
    inner = sits(gate)

    def outer(x, y):
        return inner(x, y) + 1

    torch.testing.assert_close(sits(outer)(X, Y), gate(X, Y) + 1)


def test_sequences_and_loops() -> None:
    def f(xs, n):
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        for _ in range(n):
            total = silu(total) * xs[0]
        return total

    run = sits(f)
    for count, n in [(2, 1), (3, 1), (2, 2)]:
        xs = [torch.randn(4) for _ in range(count)]
        torch.testing.assert_close(run(xs, n), f(xs, n))


# -- breaks in the graph ---------------------------------------------------------------------------------


def prints(x, y):
    a = silu(x) * y
    print("between", end="")
    return silu(a) * y


def asks_for_a_number(x, y):
    a = silu(x) * y
    return a * 2 if a.sum().item() > 0 else silu(a) * y


def branches_on_data(x, y):
    if x.sum() > 0:
        return silu(x) * y
    return silu(y) * x


def writes_then_breaks(x, y):
    x = x.clone()
    x.add_(1)
    print(end="")
    x.mul_(y)
    return silu(x) * y, x


@pytest.mark.parametrize("fn", [prints, asks_for_a_number, branches_on_data, writes_then_breaks])
def test_breaks(fn: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    run = sits(fn)
    for x in (X, -X, X.abs()):
        torch.testing.assert_close(run(x, Y), fn(x, Y))
    if fn is prints:
        assert len(graphs(prints)) >= 2


def test_data_of_numpy() -> None:
    def f(x):
        return torch.from_numpy(x.numpy() * 2) + 1

    torch.testing.assert_close(sits(f)(X), f(X))


# -- modes and contexts ----------------------------------------------------------------------------------


def test_inference_mode() -> None:
    model = Mlp()
    run = sits(model, "auto")
    with torch.inference_mode():
        inside = run(X)
        torch.testing.assert_close(inside, model(X), rtol=1e-4, atol=1e-4)
    assert inside.is_inference()
    torch.testing.assert_close(run(X), model(X), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(run(X), model(X), rtol=1e-4, atol=1e-4)


def test_parameters_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = ConvNet().eval()
        x = torch.randn(2, 3, 8, 8)
        run = sits(model)
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
            model.body[0].weight.add_(0.1)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around(dtype: torch.dtype, lowering: str) -> None:
    model = Mlp()
    run = sits(model, lowering)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(run(X), model(X), rtol=3e-2, atol=3e-2)
    with torch.no_grad():  # and without it, compiled anew
        torch.testing.assert_close(run(X), model(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_autocast_inside(lowering: str) -> None:
    model = Mlp()

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = model(x)
        return h.float() * 2

    torch.testing.assert_close(sits(f, lowering)(X), f(X), rtol=3e-2, atol=3e-2)


def test_autocast_with_gradients() -> None:
    model = Mlp()
    found = []
    for run in (model, sits(model)):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(X).float().pow(2).mean()
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=3e-2, atol=3e-2)


def test_the_default_dtype_and_device_are_left_alone() -> None:
    def f(x):
        return torch.ones(3) + torch.arange(3) * x

    run = sits(f)
    x = torch.tensor(2.0)
    torch.testing.assert_close(run(x), f(x))
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(run(x), f(x))
    finally:
        torch.set_default_dtype(torch.float32)


def test_random_numbers_are_those_of_eager() -> None:
    def f(x):
        return torch.rand(4) + torch.randn_like(x) + nn.functional.dropout(x, 0.5)

    run, x = sits(f), torch.randn(4)
    torch.manual_seed(9)
    wanted = f(x)
    torch.manual_seed(9)
    torch.testing.assert_close(run(x), wanted)
    assert not torch.equal(run(x), run(x))


def test_rules_leave_random_numbers_alone() -> None:
    def f(x):
        return silu(torch.randn_like(x)) * torch.randn_like(x)

    torch.manual_seed(1)
    wanted = f(X)
    run = sits(f)
    torch.manual_seed(1)
    torch.testing.assert_close(run(X), wanted)


# -- threads ---------------------------------------------------------------------------------------------


def test_threads_compile_and_call_at_once() -> None:
    models = [
        Mlp() for _ in range(2)
    ]  # they share a code object, and Dynamo keeps eight entries of one
    runs = [sits(m) for m in models]
    barrier = threading.Barrier(8)

    def work(k: int) -> str:
        barrier.wait()
        model, run = models[k % 2], runs[k % 2]
        with torch.no_grad():
            for n in range(2, 6):
                x = torch.full((n, 16), float(k + 1))
                if found := differences(model(x), run(x), 1e-4):
                    return found
        return ""

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [""] * 8
    assert all(fired(m) for m in models)


def test_threads_that_change_what_was_folded() -> None:
    model, x = ConvNet().eval(), torch.randn(2, 3, 8, 8)
    run = sits(model)
    with torch.no_grad():
        run(x)
    wrong: list[str] = []

    def work(_: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                out = run(x)
                if not out.isfinite().all():
                    wrong.append("not finite")

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, i) for i in range(4)]
        with torch.no_grad():
            for scale in (1.01, 0.99, 1.0):
                model.body[0].weight.mul_(scale)
        for future in futures:
            future.result()
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert not wrong


# -- values ----------------------------------------------------------------------------------------------


Pair = namedtuple("Pair", "a b")


@dataclass
class Held:
    x: torch.Tensor
    rest: dict[str, Any]


def test_containers_and_keywords() -> None:
    def f(*, pair, held, extra=None, **more):
        a = silu(pair.a) * pair.b
        out = {"a": a, "b": [held.x + held.rest["y"], (extra, more["z"] * 2)]}
        return Pair(out, len(more))

    kwargs: dict[str, Any] = {"pair": Pair(X, Y), "held": Held(X, {"y": Y}), "z": X}
    ours, eager = sits(f)(**kwargs), f(**kwargs)
    assert type(ours) is Pair and not differences(tuple(eager), tuple(ours))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
          torch.int8, torch.uint8, torch.bool, torch.complex64]  # fmt: skip


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_dtypes(lowering: str) -> None:
    def f(xs):
        return [x.t().contiguous() for x in xs], [
            x + x if x.dtype != torch.bool else x | x for x in xs
        ]

    xs = [torch.arange(6).view(2, 3).to(d) for d in DTYPES]
    assert not differences(f(xs), sits(f, lowering)(xs))


def test_complex_numbers_pass_through() -> None:
    def f(x, y):
        return x * y, (x @ y.mT).abs(), torch.view_as_real(x) * 2, x.conj() + y

    x, y = torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)
    for lowering in ("eager", "auto"):
        torch._dynamo.reset()
        assert not differences(f(x, y), sits(f, lowering)(x, y), strides=False)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_empty_and_zero_dimensional(lowering: str) -> None:
    def f(a, b, s):
        return silu(a) * a, b @ b.t(), a.sum(), s * 2, torch.cat([b, b], 1), silu(s) * s, b.mean(0)

    args = (torch.randn(0, 4), torch.randn(3, 0), torch.tensor(1.5))
    assert not differences(f(*args), sits(f, lowering)(*args), strides=False)


def test_sparse_tensors_pass_through() -> None:
    def f(s, x):
        return torch.sparse.mm(s, x) + 1

    s = torch.eye(4).to_sparse()
    x = torch.randn(4, 3)
    torch.testing.assert_close(sits(f)(s, x), f(s, x))
    csr = torch.eye(4).to_sparse_csr()
    torch.testing.assert_close(sits(f)(csr, x), f(csr, x))


class Tagged(torch.Tensor):
    """A subclass that only changes what an op gives back."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class TwoTensors(torch.Tensor):
    """A wrapper of two tensors that runs every op on both."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(cls, a, b):
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, requires_grad=False)
        made.a, made.b = a, b
        return made

    def __init__(self, a, b):
        pass

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return TwoTensors(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        def part(name):
            take = lambda t: getattr(t, name) if isinstance(t, TwoTensors) else t  # noqa: E731
            return func(*torch.utils._pytree.tree_map(take, args), **(kwargs or {}))

        a, b = part("a"), part("b")
        return TwoTensors(a, b) if isinstance(a, torch.Tensor) else a


def test_subclasses_pass_through() -> None:
    tagged = torch.randn(3, 4).as_subclass(Tagged)
    out = sits(gate)(tagged, tagged)
    assert type(out) is Tagged
    torch.testing.assert_close(
        out.as_subclass(torch.Tensor), gate(tagged, tagged).as_subclass(torch.Tensor)
    )
    torch._dynamo.reset()
    two = TwoTensors(torch.randn(3, 4), torch.randn(3, 4))
    for lowering in ("eager", "inductor"):
        torch._dynamo.reset()
        out, wanted = sits(gate, lowering)(two, two), gate(two, two)
        assert type(out) is TwoTensors
        torch.testing.assert_close((out.a, out.b), (wanted.a, wanted.b))


def test_parameters_and_buffers_as_results() -> None:
    class Gives(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("b", torch.randn(4))

        def forward(self, x):
            return self.w, self.b, self.w.t(), x @ self.w + self.b

    model, x = Gives(), torch.randn(2, 4)
    ours, eager = sits(model)(x), model(x)
    assert not differences(eager, ours)
    everything = [model.w, model.b]
    assert sharing(ours, everything) == sharing(eager, everything)
    assert ours[0] is model.w


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_buffers_that_the_model_updates(lowering: str) -> None:
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("last", torch.zeros(3, 16))
            self.register_buffer("history", torch.zeros(4, 16))

        def forward(self, x):
            self.calls += 1
            self.history[:-1] = self.history[1:].clone()
            self.history[-1] = x[0]
            before = self.last.clone()
            self.last.copy_(x)
            return silu(x) * before + self.calls

    model = Counts()
    twin = copy.deepcopy(model)
    run = sits(model, lowering)
    for _ in range(4):
        x = torch.randn(3, 16)
        torch.testing.assert_close(run(x), twin(x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_a_buffer_replaced_by_the_model() -> None:
    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(4))

        def forward(self, x):
            self.state = self.state * 0.5 + x
            return silu(self.state) * x

    model = Replaces()
    twin = copy.deepcopy(model)
    run = sits(model)
    for _ in range(3):
        x = torch.randn(4)
        torch.testing.assert_close(run(x), twin(x))
        torch.testing.assert_close(model.state, twin.state)


# -- the model stays a model -----------------------------------------------------------------------------


def test_copies_and_pickles_of_a_compiled_model() -> None:
    model = Mlp()
    run = sits(model)
    wanted = run(X)
    twin = copy.deepcopy(run)
    torch.testing.assert_close(twin(X), wanted)
    model.compile(backend="sits", options={"lowering": "eager"})
    torch.testing.assert_close(model(X), wanted)
    torch.testing.assert_close(copy.deepcopy(model)(X), wanted)
    restored = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(restored(X), wanted)
    assert list(model.state_dict()) == list(Mlp().state_dict())


def test_an_error_of_the_model_stays_its_own() -> None:
    def f(x):
        if x.shape[0] > 3:
            raise KeyError("too many rows")
        return x * 2

    run = sits(f)
    torch.testing.assert_close(run(X), f(X))
    error = raised(run, torch.randn(5, 16))
    assert isinstance(error, KeyError) and "too many rows" in str(error)


def test_an_error_at_run_time_is_eagers() -> None:
    def f(x, i):
        return x[i] * 2

    error = raised(sits(f), X, torch.tensor([7]))
    assert isinstance(error, IndexError), repr(error)
