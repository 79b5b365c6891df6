"""Inputs that are remembered from call to call: used where they are the same, gathered anew where anything changed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sitsopt.dispatch.bytecode import without_gathering
from sitsopt.dispatch.dispatcher import Dispatcher
from sitsopt.dispatch.inputs import MOST_MISSES
from sitsopt.dispatch.versions import available
from sitsopt.whole import compiled_call

pytestmark = pytest.mark.skipif(bool(available()), reason=available() or "dict versions work")


class Layer:
    def __init__(self) -> None:
        self.keys = torch.zeros(4)


class Cache:
    """As caches of language models are: layers in a list, tensors that a call writes in place."""

    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, cache: Any = None, **more: Any) -> dict[str, Any]:
        y = x * self.weight
        for layer in cache.layers if cache is not None else ():
            layer.keys.add_(y)
            y = y + layer.keys
        return {"y": y + more["bias"] if "bias" in more else y, "cache": cache}


def make() -> tuple[Net, Dispatcher]:
    torch.manual_seed(0)
    model = Net().eval()
    return model, compiled_call(model, {"lowering": "eager"})


def step(model: Net, call: Dispatcher, cache: Any, **more: Any) -> bool:
    """One call, equal to eager in its result and what it wrote; whether the inputs were known."""
    x, layers = torch.randn(4), [layer.keys.clone() for layer in cache.layers]
    got = call(x, cache=cache, **more)
    assert got["cache"] is cache
    mine = Cache()
    for layer, keys in zip(mine.layers, layers, strict=True):
        layer.keys = keys
    want = model(x, cache=mine, **more)
    torch.testing.assert_close(got["y"], want["y"])
    for layer, other in zip(cache.layers, mine.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
    assert not call.given_up
    return call.entries[0].inputs.misses == 0


@torch.no_grad()
def test_the_second_call_knows_its_inputs() -> None:
    model, call = make()
    cache = Cache()
    assert [step(model, call, cache) for _ in range(4)] == [False, True, True, True]
    assert call.entries[0].short is not None


def another_weight(model: Net, cache: Cache) -> None:
    model.weight = nn.Parameter(torch.randn(4))


def a_weight_moved(model: Net, cache: Cache) -> None:
    model.weight.data = torch.randn(4)


def other_keys(model: Net, cache: Cache) -> None:
    cache.layers[1].keys = torch.randn(4)


def another_layer(model: Net, cache: Cache) -> None:
    cache.layers[0] = Layer()


def layers_swapped(model: Net, cache: Cache) -> None:
    cache.layers.reverse()


def another_list(model: Net, cache: Cache) -> None:
    cache.layers = [Layer(), Layer()]


@pytest.mark.parametrize(
    "change",
    [another_weight, a_weight_moved, other_keys, another_layer, layers_swapped, another_list],
)
@torch.no_grad()
def test_what_changed_is_gathered_anew(change: Callable[[Net, Cache], None]) -> None:
    model, call = make()
    cache = Cache()
    step(model, call, cache)
    assert step(model, call, cache)
    change(model, cache)
    step(model, call, cache)
    assert step(model, call, cache)


@torch.no_grad()
def test_another_cache_and_tensors_among_the_keywords() -> None:
    model, call = make()
    one, two = Cache(), Cache()
    for cache in (one, one, two, two, one):
        step(model, call, cache, bias=torch.randn(4))
    assert step(model, call, one, bias=torch.randn(4))
    assert len(call.entries) == 1


@torch.no_grad()
def test_caches_that_are_never_twice_the_same_are_not_looked_into_for_ever() -> None:
    model, call = make()
    for _ in range(MOST_MISSES + 3):
        step(model, call, Cache())
    assert call.entries[0].inputs.misses == MOST_MISSES


@torch.no_grad()
def test_a_cache_is_not_kept_alive() -> None:
    model, call = make()
    cache = Cache()
    for _ in range(3):
        step(model, call, cache)
    keys = weakref.ref(cache.layers[0].keys)
    del cache
    gc.collect()
    assert keys() is None


@torch.no_grad()
def test_an_argument_that_cannot_be_looked_into_is_gathered_every_time() -> None:
    class Slotted:
        __slots__ = ("__weakref__", "layers")

        def __init__(self) -> None:
            self.layers = [Layer()]

    model, call = make()
    cache = Slotted()
    for _ in range(3):
        x = torch.ones(4)
        keys = cache.layers[0].keys.clone()
        torch.testing.assert_close(
            call(x, cache=cache)["y"], x * model.weight + keys + x * model.weight
        )
        cache.layers = [Layer()]
    assert call.given_up or call.entries[0].inputs.known is None


@torch.no_grad()
def test_threads_do_not_take_each_others_inputs() -> None:
    model, call = make()
    shared = Cache()
    for _ in range(2):
        step(model, call, shared)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        with torch.no_grad():
            for i in range(200):
                x = torch.full((4,), float(seed * 1000 + i))
                got = call(x)["y"]
                if not torch.equal(got, x * model.weight):
                    wrong.append((seed, i))

    call(torch.ones(4)), call(torch.ones(4))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_byte_code_that_is_laid_out_otherwise_is_left_alone() -> None:
    def plain(x: int) -> int:
        y = x + 1
        return graph(y, x) + 1  # type: ignore[name-defined]  # noqa: F821

    def used_later(x: int) -> int:
        return graph(y := x + 1) + y  # type: ignore[name-defined]  # noqa: F821

    def jumps(x: int) -> int:
        return graph(1 if x else 2)  # type: ignore[name-defined]  # noqa: F821

    def twice(x: int) -> int:
        return graph(x) + graph(x)  # type: ignore[name-defined]  # noqa: F821

    made = without_gathering(plain.__code__, "graph")
    assert made is not None
    assert eval("f(1)", {"f": type(plain)(made, {"graph": lambda: 7})}) == 8
    for other in (used_later, jumps, twice):
        assert without_gathering(other.__code__, "graph") is None
