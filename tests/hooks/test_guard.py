"""Signs of memory running out, steps down, and calls that are made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sitsopt.runtime.hooks import Wanted, memory, plan_hooks
from sitsopt.runtime.hooks.guard import Guard
from sitsopt.runtime.hooks.memory import Reading, Thresholds, Trend
from sitsopt.runtime.hooks.rollback import CannotUndo, snapshot
from sitsopt.runtime.hooks.smaller import shrink_cache
from sitsopt.runtime.hooks.stepdown import (
    Call,
    Done,
    Guarded,
    SmallerCalls,
    Step,
    absent,
    divisible,
    is_allocation_failure,
)
from sitsopt.spec.recipe import load_recipe
from sitsopt.spec.target import load_target
from tests.hooks.fakes import host

MB = 1 << 20
PLENTY = Reading(0.0, free=1 << 40)


def fails(times: int, error: Exception | None = None) -> Callable[..., Any]:
    """A call that fails so often, then answers with how often it was made."""
    made = [0]

    def call(*args: Any, **kwargs: Any) -> int:
        made[0] += 1
        if made[0] <= times:
            raise error or MemoryError("no more")
        return made[0]

    return call


def steps(taken: list[str], *names: str) -> list[Step]:
    return [Step(n, lambda call, n=n: taken.append(n) or f"did {n}") for n in names]


def guarded(call: Callable[..., Any], made: list[Step], **more: Any) -> Guarded:
    return Guarded(call, made, Thresholds(**more), reading=lambda: PLENTY)


def test_the_same_call_again_after_a_step() -> None:
    taken: list[str] = []
    one = guarded(fails(2), steps(taken, "pools", "graphs", "plain"))
    assert one() == 3 and taken == ["pools", "graphs"]
    assert one() == 4 and taken == ["pools", "graphs"]
    assert [(e.call, e.step, e.done) for e in one.events] == [
        (0, "pools", "did pools"),
        (0, "graphs", "did graphs"),
    ]
    assert all("MemoryError: no more" in event.cause for event in one.events)
    assert one.taken() == {0: ["pools", "graphs"]}


def test_no_step_is_left() -> None:
    with pytest.raises(MemoryError, match="no more"):
        guarded(fails(3), steps([], "pools", "graphs"))()


def test_other_errors_are_the_callers() -> None:
    taken: list[str] = []
    with pytest.raises(RuntimeError, match="shape"):
        guarded(fails(1, RuntimeError("shape mismatch")), steps(taken, "pools"))()
    assert taken == []


def test_what_has_nothing_to_give_is_said_and_skipped() -> None:
    taken: list[str] = []
    one = guarded(fails(1), [absent("cache", "no smaller form"), *steps(taken, "graphs")])
    assert one() == 2 and taken == ["graphs"]
    assert one.events[0].done == "nothing: no smaller form"
    assert one.taken() == {0: ["graphs"]}


def test_a_step_may_change_the_call() -> None:
    plain = Step("graphs", lambda call: "left", gives=lambda *args: "plain")
    assert guarded(fails(99), [plain])() == "plain"


def test_a_run_can_be_repeated_by_force() -> None:
    taken: list[str] = []
    one = guarded(fails(0), steps(taken, "pools", "graphs"))
    one.forced = {2: ["graphs"]}
    for _ in range(4):
        one()
    assert taken == ["graphs"] and one.taken() == {2: ["graphs"]}


def test_rows_are_split_once_the_graphs_are_left() -> None:
    """As often as it helps, and again by force at the same calls."""

    def room_for(rows: int) -> int:
        if rows > 4:
            raise MemoryError(f"{rows} rows")
        return rows

    def whole(one: Guarded) -> list[int]:
        sizes, rows, left = [], 16, 16
        while left:
            try:
                with divisible():
                    left -= one(min(rows, left))
            except SmallerCalls:
                rows //= 2
                continue
            sizes.append(min(rows, 16))
        return sizes

    leave = Step("graphs", lambda call: "left", gives=room_for)
    one = guarded(room_for, [absent("cache", "no smaller form"), leave])
    assert whole(one) == [4, 4, 4, 4]
    assert one.taken() == {0: ["graphs", "rows"], 1: ["rows"]}
    forced = guarded(lambda rows: rows, [absent("cache", "no"), leave])
    forced.call, forced.forced = (lambda rows: rows), one.taken()
    assert whole(forced) == [4, 4, 4, 4] and forced.taken() == one.taken()
    with pytest.raises(MemoryError, match="16 rows"):
        one(16)  # whoever cannot split it is told


def test_parts_of_a_step_are_forced_too() -> None:
    asked: list[int | None] = []
    step = Step("cache", lambda call: asked.append(call.most) or Done("two layers", 2))
    one = guarded(fails(1), [step])
    one()
    assert one.taken() == {0: ["cache:2"]}
    again = guarded(fails(0), [step])
    again.forced = one.taken()
    again()
    assert asked == [None, 2] and again.taken() == one.taken()


def test_a_request_that_fails_between_its_calls_begins_anew() -> None:
    """With the same random numbers, and with every step so far from its beginning."""
    taken: list[str] = []
    one = guarded(fails(1), steps(taken, "pools", "graphs"))
    seen: list[list[float]] = []

    def generate(tokens: int) -> str:
        seen.append([])
        for _ in range(tokens):
            one()
            seen[-1].append(float(torch.rand(())))
            if len(seen) == 1 and len(seen[0]) == 2:
                raise RuntimeError("can't allocate memory: the logits that are kept")
        return "done"

    assert one.request(generate, 4) == "done" and taken == ["pools", "graphs"]
    assert seen[1][:2] == seen[0] and len(seen[1]) == 4
    assert one.calls == 4 and one.taken() == {0: ["pools", "graphs"]}
    with pytest.raises(RuntimeError, match="kept"):
        seen.clear()
        one.request(generate, 4)


def test_what_was_streamed_is_not_said_twice() -> None:
    one, said = guarded(fails(0), steps([], "pools")), []

    def generate(streamer: Any) -> None:
        streamer.append("a")
        raise MemoryError

    with pytest.raises(MemoryError):
        one.request(generate, streamer=said)
    assert said == ["a"]


def test_a_cache_that_can_become_smaller() -> None:
    class Cache:
        small = False

        def step_down(self) -> str:
            self.small = True
            return "now in 4 bits"

    cache = Cache()
    one = guarded(fails(1), [shrink_cache()])
    assert one(cache=cache) == 2 and cache.small
    assert one.events[0].done == "now in 4 bits"
    with pytest.raises(MemoryError):
        guarded(fails(1), [shrink_cache()])(torch.zeros(1))


def test_a_static_cache_goes_to_four_bits(tiny_model: Any) -> None:
    """In the middle of a text: smaller, its newest tokens as they were, and decoding goes on near where it was."""
    from transformers import StaticCache

    exact, cache = (StaticCache(config=tiny_model.config, max_cache_len=1024) for _ in range(2))
    text = torch.arange(1, 161).view(1, -1) % 97
    with torch.no_grad():
        for one in (exact, cache):
            tiny_model(input_ids=text, cache=one)
        before = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        step = shrink_cache(tiny_model._call_impl)
        call = Call((), {"cache": cache})
        assert step.missing(call) == ""
        done = step.take(call)
        assert isinstance(done, Done) and done.parts == 2
        assert done.text.startswith("2 of 2 layers in 4 bits: ")
        assert sum(layer.state.nbytes for layer in cache.layers) < before / 3
        assert step.missing(call) == "the cache in use has no smaller form"
        one, other = (
            tiny_model(input_ids=torch.tensor([[5]]), cache=c).logits for c in (exact, cache)
        )
    assert int(cache.layers[0].get_seq_length()) == 161
    assert not torch.equal(one, other) and torch.allclose(
        one, other, atol=0.1 * float(one.abs().max())
    )


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_a_step_that_changes_layers_is_seen_by_the_next_failure(tiny_model: Any) -> None:
    """The call fails again behind the cache's step: what is taken back is what the new layers hold."""
    from transformers import StaticCache

    short = StaticCache(config=tiny_model.config, max_cache_len=64)
    cache = StaticCache(config=tiny_model.config, max_cache_len=512)
    left = [2]

    def call(**kwargs: Any) -> Any:
        found = tiny_model._call_impl(**kwargs)
        left[0] -= 1
        if left[0] >= 0:
            raise MemoryError
        return found

    with torch.no_grad():
        tiny_model(input_ids=torch.arange(1, 21).view(1, -1), cache=cache)
        tiny_model(input_ids=torch.tensor([[1]]), cache=short)
        assert shrink_cache(call).missing(Call((short,))), "a short one would not be smaller"
        taken: list[str] = []
        one = guarded(call, [shrink_cache(call), *steps(taken, "graphs")])
        one(input_ids=torch.tensor([[7]]), cache=cache)
    assert taken == ["graphs"] and int(cache.layers[1].get_seq_length()) == 21


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(2, "No such file"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("MemoryError: \n\nfrom user code"), True),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_are_failures_of_memory(error: Exception, expected: bool) -> None:
    assert is_allocation_failure(error) is expected


def test_torch_says_so_when_it_really_fails() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_allocation_failure(raised.value)


# Signs


def signs(limits: Thresholds, *readings: Reading) -> list[str]:
    trend = Trend(limits)
    return [trend.sign(each) for each in readings]


def test_failures_a_minute() -> None:
    trend = Trend(Thresholds())
    for at in (0.0, 10.0, 65.0):
        trend.failed(at)
    assert trend.sign(Reading(66.0)) == ""  # the first is more than a minute old
    trend.failed(67.0)
    assert trend.sign(Reading(68.0)) == "3 failed or retried allocations within a minute"


def test_retries_that_the_device_counts() -> None:
    assert signs(Thresholds(), Reading(0.0, retries=5), Reading(1.0, retries=7), Reading(2.0, retries=8)) == [
        "", "", "3 failed or retried allocations within a minute",
    ]  # fmt: skip


@pytest.mark.parametrize(("target", "share"), [("a100", 0.082), ("h100", 0.057)])
def test_fragmentation_by_target(target: str, share: float, tmp_path: Path) -> None:
    hook = Guard()
    plan_hooks(
        {"guard": {}},
        Wanted(target=load_target(target)),
        host(tmp_path, None),
        given={"guard": hook},
    )
    assert hook.thresholds == Thresholds(3.0, share)
    below, above = Reading(0.0, fragmentation=share), Reading(1.0, fragmentation=share + 0.001)
    assert signs(hook.thresholds, below, above) == [
        "",
        f"fragmentation {share + 0.001:.1%} is over {share:.1%}",
    ]


def test_growth_against_what_is_free() -> None:
    readings = [Reading(float(i), (100 - 4 * i) * MB, 4 * i * MB) for i in range(20)]
    found = signs(Thresholds(), *readings)
    first = next(i for i, sign in enumerate(found) if sign)
    assert readings[first].free < 16 * 4 * MB <= readings[first - 1].free
    assert found[first] == f"{100 - 4 * first} MB are left, and a call takes 4.0 MB"
    still = [Reading(float(i), 20 * MB, 7 * MB) for i in range(20)]
    assert not any(signs(Thresholds(), *still))


def test_a_limit_that_comes_later_is_no_growth() -> None:
    later = Reading(1.0, 60 * MB, 900 * MB, "address space")
    assert signs(Thresholds(), Reading(0.0, 9000 * MB, 100 * MB, "machine"), later) == ["", ""]


def test_room_that_stays_free() -> None:
    assert signs(Thresholds(headroom_mb=64), Reading(0.0, free=65 * MB), Reading(1.0, free=63 * MB)) == [
        "", "63 MB are left, 64 are to stay free",
    ]  # fmt: skip


def test_page_faults() -> None:
    readings = [Reading(0.0, faults=0), Reading(1.0, faults=50), Reading(2.0, faults=250)]
    assert signs(Thresholds(faults=100), *readings) == [
        "",
        "",
        "more than 100 major page faults a second",
    ]


def test_a_sign_takes_one_step() -> None:
    taken: list[str] = []
    readings = iter(
        [Reading(0.0, free=10 * MB), Reading(1.0, free=10 * MB), Reading(2.0, free=900 * MB)]
    )
    one = Guarded(
        fails(0),
        steps(taken, "pools", "graphs", "plain"),
        Thresholds(headroom_mb=64),
        lambda: next(readings),
    )
    for _ in range(3):
        one()
    assert taken == ["pools", "graphs"]


def test_this_process_can_be_read() -> None:
    found = memory.read()
    assert found.free is not None and found.free > 0
    assert found.fragmentation is None or 0 <= found.fragmentation <= 1
    assert found.faults is not None and found.retries is None


# By recipe


def test_the_recipe_decides(tmp_path: Path) -> None:
    recipe = load_recipe(
        {"hooks": {"guard": {"failures": 5, "fragmentation": 0.5, "steps": ["graphs", "pools"]}}}
    )
    hook = Guard()
    run = plan_hooks(
        recipe.hooks.sections(),
        Wanted(target=load_target("h100")),
        host(tmp_path, None),
        given={"guard": hook},
    )
    assert hook.thresholds == Thresholds(5.0, 0.5) and hook.order == ("graphs", "pools")
    run.apply()
    taken: list[str] = []
    one = hook.around(fails(1), {"graphs": steps(taken, "graphs")[0]})
    assert one() == 2 and taken == ["graphs"]
    assert hook.report()["events"][0]["step"] == "graphs"


# What a call did to its cache


def caches() -> dict[str, Callable[[], Any]]:
    from transformers import DynamicCache, LlamaConfig, StaticCache

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1
    )
    return {
        "growing": lambda: DynamicCache(config=config),
        "fixed": lambda: StaticCache(config=config, max_cache_len=12),
    }


def quantized() -> Any:
    from transformers import LlamaConfig

    from sitsopt.runtime.kv.cache import QuantizedKVCache

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1
    )
    return QuantizedKVCache(config, 256, "int4")


def test_tokens_that_are_packed_already_are_taken_back() -> None:
    cache, other = quantized(), quantized()
    for one in (cache, other):
        feed(one, 0, 70)
    undo = snapshot((), {"cache": cache})
    feed(cache, 500, 2, layers=1)
    undo()
    for one in (cache, other):
        feed(one, 70, 2)
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == 72
        ours_now, theirs_now = (
            layer.update(*[torch.zeros(1, 1, 1, 8)] * 2) for layer in (ours, theirs)
        )
        assert all(
            torch.equal(a[:, :, :73], b[:, :, :73])
            for a, b in zip(ours_now, theirs_now, strict=True)
        )


def feed(cache: Any, start: int, count: int, layers: int = 2) -> None:
    for layer in range(layers):
        values = (
            torch.arange(start, start + count, dtype=torch.float32)
            .view(1, 1, count, 1)
            .expand(1, 1, count, 8)
        )
        cache.update(values + 100 * layer, -values, layer)


@pytest.mark.parametrize("name", ["growing", "fixed"])
@pytest.mark.parametrize("failed", [1, 2])
@pytest.mark.parametrize("before", [0, 3])
def test_half_a_call_is_taken_back(name: str, failed: int, before: int) -> None:
    """As if the failed call had never been: lengths, and what is kept after the call was made again."""
    cache, other = caches()[name](), caches()[name]()
    for one in (cache, other):
        if before:
            feed(one, 0, before)
    undo = snapshot((), {"cache": cache})
    feed(cache, 50, 2, layers=failed)
    undo()
    for one in (cache, other):
        feed(one, before, 2)
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == before + 2
        assert torch.equal(ours.keys[..., : before + 2, :], theirs.keys[..., : before + 2, :])
        assert torch.equal(ours.values[..., : before + 2, :], theirs.values[..., : before + 2, :])


def test_a_growing_window_is_taken_back() -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer

    def layer(tokens: int) -> Any:
        made = DynamicSlidingWindowLayer(sliding_window=4)
        for i in range(tokens):
            made.update(torch.full((1, 1, 1, 2), float(i)), torch.full((1, 1, 1, 2), -float(i)))
        return made

    class Cache:
        layers = [layer(6)]  # noqa: RUF012

        def get_seq_length(self) -> int:
            return 6

    cache = Cache()
    undo = snapshot((cache,), {})
    cache.layers[0].update(torch.full((1, 1, 1, 2), 99.0), torch.full((1, 1, 1, 2), 99.0))
    undo()
    expected = layer(6)
    assert torch.equal(cache.layers[0].keys, expected.keys)
    assert cache.layers[0].get_seq_length() == expected.get_seq_length()


def test_a_window_that_shifts_in_place_cannot_be() -> None:
    from transformers.cache_utils import StaticSlidingWindowLayer

    class Cache:
        layers = [StaticSlidingWindowLayer(max_cache_len=8, sliding_window=4)]  # noqa: RUF012

        def get_seq_length(self) -> int:
            return 0

    cache = Cache()
    cache.layers[0].update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    undo = snapshot((cache,), {})
    with pytest.raises(CannotUndo, match="StaticSlidingWindowLayer shifts in place"):
        undo()
    taken: list[str] = []
    with pytest.raises(MemoryError):
        guarded(fails(1), steps(taken, "pools"))(cache)
    assert taken == []


def test_a_cache_with_its_own_snapshot() -> None:
    class Own:
        kept: list[int] = [1, 2]  # noqa: RUF012

        def snapshot(self) -> Callable[[], None]:
            length = len(self.kept)
            return lambda: self.kept.__delitem__(slice(length, None))

    cache = Own()
    undo = snapshot((cache,), {})
    cache.kept.append(3)
    undo()
    assert cache.kept == [1, 2]
