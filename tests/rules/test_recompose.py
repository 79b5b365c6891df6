"""Spellings that become one op: those of public models bit by bit, those written by hand, and those that must not."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sitsopt.pipeline import Plan, process
from sitsopt.rewrite.order import ordered
from sitsopt.rewrite.record import GraphRecord
from sitsopt.runtime.lower import Lowering
from sitsopt.spec.locate import rule_dirs
from sitsopt.spec.rule import Rule, load_rules
from tests.cases.harness import BF16, F32, LAYOUTS, Compiled, check, compiled, rewrite_case
from tests.rules.models import DECODERS, build, call

STAGES = ("clean", "recompose", "attention")
RULES = [r for r in ordered(load_rules(rule_dirs(()))) if r.stage in STAGES]
EXACT = [r for r in RULES if not r.tolerance]
F16 = torch.float16
INF = math.inf


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def fired(code: Compiled) -> Counter[str]:
    return Counter(s.rule for r in code.records for s in r.sites if not s.rule.startswith("clean/"))


def recomposed(
    fn: Callable[..., Any], args: list[Any], tolerance: float | None = None
) -> Counter[str]:
    """What fired on a function whose results were compared with eager's."""
    return fired(check(fn, args, RULES, tolerance=tolerance))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# -- public models --------------------------------------------------------------------------------------


def run(model: nn.Module, phase: str, rules: list[Rule]) -> tuple[Counter[str], Any, Any]:
    plan = Plan(rules, lowering=Lowering("eager", repeat=False), strict=True)
    records: list[GraphRecord] = []

    def backend(gm: Any, inputs: Any, **_: Any) -> Any:
        records.append(GraphRecord("g"))
        return process(gm, inputs, plan, records[-1]).call()

    torch._dynamo.reset()
    with torch.no_grad():
        args, kwargs = call(model, phase)
        eager = model(*args, **kwargs)[0]
        args, kwargs = call(model, phase)
        ours = torch.compile(model, backend=backend)(*args, **kwargs)[0]
    return Counter(s.rule for r in records for s in r.sites), eager, ours


LAYER = {  # what one forward pass of two layers holds, torch's attention and the written-out one
    "llama": {"recompose/rms_norm": 5, "recompose/rope": 4, "attention/gqa": 2},
    "gemma2": {"recompose/rms_norm_wide": 9, "recompose/rope": 4, "attention/gqa": 2,
               "recompose/attention_softcap": 2},
    "gemma3": {"recompose/rms_norm_wide": 13, "recompose/rope": 4, "attention/gqa": 2},
    "gpt_oss": {"recompose/rms_norm_wide": 5, "recompose/rope": 4, "attention/gqa": 2,
                "recompose/attention_sinks": 2},
    "cohere": {"recompose/rope": 4, "attention/gqa": 2},
    "phi": {"recompose/rope_part": 4},
    "glm": {"recompose/rms_norm": 5, "recompose/rope_part": 4, "attention/gqa": 2},
    "gptj": {"recompose/rope_part": 4},
    "gpt2": {"recompose/conv1d": 8},
    "t5": {"recompose/rms_norm": 12},
    "falcon": {"recompose/linear": 8, "recompose/rope": 4},
    "nanochat": {"recompose/rms_norm_bare": 10, "recompose/rope": 4, "attention/gqa": 2},
}  # fmt: skip
SAMPLE = {"llama", "gemma2", "gpt_oss", "phi"}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in LAYER]
)
def test_exact_rules_keep_every_bit_of_a_model(name: str, attn: str) -> None:
    """In bf16 any other order of rounding would show."""
    phase = "decode" if name in DECODERS else "forward"
    counts, eager, ours = run(build(name, attn, BF16), phase, EXACT)
    assert torch.equal(eager, ours)
    assert LAYER[name].items() <= counts.items()


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_grouped_heads_are_found_in_every_layer(phase: str) -> None:
    model = build("llama", dtype=F32, layers=30)
    counts, eager, ours = run(model, phase, EXACT)
    assert counts["attention/gqa"] == 30
    assert counts["recompose/rms_norm"] == 61
    assert counts["recompose/rope"] == 60
    assert torch.equal(traced(model, phase), ours)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)  # as it takes another branch


def traced(model: nn.Module, phase: str) -> Any:
    """What Dynamo's graph gives without any rule. In f32 it is not eager's bit for bit: transformers asks whether it
    is traced, and repeats keys and values then where it groups the queries otherwise."""
    torch._dynamo.reset()
    args, kwargs = call(model, phase)
    with torch.no_grad():
        return torch.compile(model, backend="eager")(*args, **kwargs)[0]


# -- norms ----------------------------------------------------------------------------------------------


def llama_norm(x, w):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def gemma_norm(x, w):
    wide = x.float()
    return (
        wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())
    ).type_as(x)


def t5_norm(x, w):
    x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (x.to(w.dtype) if w.dtype in (F16, BF16) else x)


def vllm_norm(x, w):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + 1e-6)
    return wide.to(x.dtype) * w


def torch_norm(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


@pytest.mark.parametrize("norm", [llama_norm, gemma_norm, t5_norm, vllm_norm, torch_norm])
@pytest.mark.parametrize("stream, gain", itertools.product([BF16, F16, F32], repeat=2))
def test_mixed_types_match_bit_for_bit_or_not_at_all(norm, stream, gain) -> None:
    code = check(norm, [randn(3, 7, 24).to(stream), randn(24).to(gain)], EXACT, tolerance=0.0)
    matched = sum(fired(code).values())
    assert matched == 1 or (norm is t5_norm and gain is not stream)


def test_mixed_types_behind_a_residual() -> None:
    """The effective gain is f32 because of `w.float() + 1`, the stream bf16."""

    def f(x, residual, w):
        h = x + residual
        n = h.float() * torch.rsqrt(h.float().pow(2).mean(-1, True) + 1e-6)
        return (n * (w.float() + 1)).to(x.dtype), h

    for stream, gain in itertools.product([BF16, F16, F32], [BF16, F32]):
        args = [randn(4, 32).to(stream), randn(4, 32).to(stream), randn(32).to(gain)]
        check(f, args, EXACT, tolerance=0.0)


def test_norms_have_gradients_and_take_any_layout() -> None:
    args = [randn(3, 5, 8), randn(8)]
    rewrite_case(llama_norm, args, RULES, must_fire=True, layouts=LAYOUTS[:4])
    rewrite_case(gemma_norm, args, RULES, must_fire=True, layouts=LAYOUTS[:2])


# -- attention ------------------------------------------------------------------------------------------


def qkv(batch=2, heads=3, queries=5, keys=7, dim=16, dtype=F32) -> list[torch.Tensor]:
    return [
        randn(batch, heads, queries, dim).to(dtype), randn(batch, heads, keys, dim).to(dtype),
        randn(batch, heads, keys, dim).to(dtype),
    ]  # fmt: skip


OPEN = torch.ones(5, 7).tril(2).bool()
EAGER, ROUNDED = "recompose/attention_eager", "recompose/attention_rounded"
FILLED, OP = "recompose/attention_masked_fill", "recompose/attention"
WRITTEN: dict[str, tuple[Callable[..., Any], str]] = {
    "scaled behind": (lambda q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v, EAGER),
    "scaled before": (lambda q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v, EAGER),
    "divided": (lambda q, k, v: (q @ k.mT / math.sqrt(16)).softmax(-1) @ v, ROUNDED),
    "the softmax of a function": (
        lambda q, k, v: F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3, -1, dtype=F32).to(v.dtype) @ v,
        EAGER),
    "an added mask": (
        lambda q, k, v: (q @ k.mT * 0.3 + torch.where(OPEN, 0.0, -1e9).to(q.dtype)).softmax(-1) @ v, EAGER),
    "nanoGPT": (
        lambda q, k, v: F.softmax((q @ k.mT * 0.25).masked_fill(~OPEN, -INF), dim=-1) @ v, FILLED),
    "filled, divided": (
        lambda q, k, v: (q @ k.mT / 4.0).masked_fill(~OPEN, torch.finfo(q.dtype).min).softmax(-1) @ v,
        FILLED),
    "torch's, no scale": (F.scaled_dot_product_attention, OP),
    "torch's, causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), OP),
    "torch's, masked": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, OPEN, scale=0.3), OP),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", WRITTEN)
def test_written_by_hand(name: str, dtype: torch.dtype) -> None:
    fn, rule = WRITTEN[name]
    counts = recomposed(fn, qkv(dtype=dtype))
    if dtype is BF16 and rule == EAGER and "function" not in name:
        rule = ROUNDED  # softmax in bf16
    assert counts == {rule: 1}


NOT: dict[str, Callable[..., Any]] = {
    "-1e9 is not low enough": lambda q, k, v: (
        (q @ k.mT / 4).masked_fill(~OPEN, -1e9).softmax(-1) @ v
    ),
    "over the queries": lambda q, k, v: (q @ k.mT * 0.3).softmax(-2) @ v,
    "a scale that is a value": lambda q, k, v: (q @ k.mT * q.mean()).softmax(-1) @ v,
    "the weights are returned": lambda q, k, v: ((p := (q @ k.mT * 0.3).softmax(-1)) @ v, p),
    "the scores are read": lambda q, k, v: ((s := q @ k.mT * 0.3).softmax(-1) @ v, s.amax()),
    "a log softmax": lambda q, k, v: (q @ k.mT * 0.3).log_softmax(-1) @ v,
    "three dims": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
}


@pytest.mark.parametrize("name", NOT)
def test_no_attention(name: str) -> None:
    assert recomposed(NOT[name], qkv()) == {}


@pytest.mark.parametrize("t, heads, dim", [(4, 4, 4), (8, 8, 8), (8, 4, 8), (5, 3, 7)])
def test_a_key_permuted_into_place_is_bound_as_it_lies(t: int, heads: int, dim: int) -> None:
    def f(x, wq, wk, wv):
        b = x.shape[0]
        q = (x @ wq).view(b, t, heads, dim).permute(0, 2, 1, 3)
        v = (x @ wv).view(b, t, heads, dim).permute(0, 2, 1, 3)
        k = (x @ wk).view(b, t, heads, dim).permute(0, 2, 3, 1)
        return ((q @ k) * 0.35).softmax(-1) @ v

    width = heads * dim
    args = [randn(2, t, width), *[randn(width, width) / width for _ in range(3)]]
    assert recomposed(f, args) == {EAGER: 1}


def test_a_permutation_that_is_no_transpose_is_no_key() -> None:
    """With every dim the same, only the permutation tells."""
    for dims in itertools.permutations(range(4)):
        check(
            lambda q, k, v, d=dims: (q @ k.permute(d) * 0.3).softmax(-1) @ v,
            [randn(3, 3, 3, 3)] * 3,
            RULES,
        )


@pytest.mark.parametrize("queries, keys", [(1, 9), (3, 9), (9, 9), (9, 3)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_masks_stay_masks(queries: int, keys: int, dtype: torch.dtype) -> None:
    """Bottom right, as a cache needs it, is no `causal`, which counts from the top left; one-hot values tell who was
    attended."""
    q, k = randn(1, 2, queries, 8).to(dtype), randn(1, 2, keys, 8).to(dtype)
    v = torch.eye(keys, dtype=dtype).expand(1, 2, keys, keys)
    mask = torch.ones(queries, keys).tril(keys - queries).bool()
    low = torch.zeros(queries, keys, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    def whole(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask)

    def written(q, k, v):
        return torch.softmax(q @ k.mT * 0.3 + low, -1, dtype=F32).to(q.dtype) @ v

    def causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for fn in (whole, written, causal):
        assert sum(recomposed(fn, [q, k, v]).values()) == 1


EMPTY = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]).bool()


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(F32).min, -INF])
@pytest.mark.parametrize("written", ["filled", "added"])
def test_rows_that_attend_nothing_are_as_eager_has_them(fill: float, written: str) -> None:
    """The mean of the values for a finite mask, NaN for -inf."""

    def f(q, k, v):
        scores = q @ k.mT * 0.5
        low = torch.zeros(3, 3).masked_fill(~EMPTY, fill)
        scores = scores.masked_fill(~EMPTY, fill) if written == "filled" else scores + low
        return scores.softmax(-1) @ v

    args = [randn(1, 2, 3, 4) for _ in range(3)]
    counts = recomposed(f, args)
    assert sum(counts.values()) == (0 if fill == -1e9 and written == "filled" else 1)
    result = compiled(f, RULES).call(*args)[0, 0, 1]
    assert result.isnan().all() if fill == -INF else torch.allclose(result, args[2][0, 0].mean(0))


def test_torchs_own_op_gives_zeros_for_them() -> None:
    counts = recomposed(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, EMPTY), qkv(1, 2, 3, 3, 4)
    )
    assert counts == {OP: 1}


def repeated(x: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


GROUPED: dict[str, tuple[Callable[..., Any], int]] = {
    "repeat_kv": (lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k, 3), repeated(v, 3)), 1),
    "written out": (lambda q, k, v: (q @ repeated(k, 3).mT * 0.3).softmax(-1) @ repeated(v, 3), 1),
    "interleaved": (lambda q, k, v: F.scaled_dot_product_attention(
        q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)), 1),
    "torch's own groups": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), 0),
    "another order of heads": (lambda q, k, v: F.scaled_dot_product_attention(
        q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)), 0),
    "the repeated keys are returned": (lambda q, k, v: (
        F.scaled_dot_product_attention(q, r := repeated(k, 3), repeated(v, 3)), r), 0),
}  # fmt: skip


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads(name: str, kv_heads: int) -> None:
    fn, grouped = GROUPED[name]
    q = randn(2, 3 * kv_heads, 5, 16)
    k, v = randn(2, kv_heads, 7, 16), randn(2, kv_heads, 7, 16)
    counts = recomposed(fn, [q, k, v])
    order_shows = not (name == "another order of heads" and kv_heads == 1)
    assert counts["attention/gqa"] == grouped or not order_shows
    assert sum(counts.values()) >= 1


def test_attention_has_gradients() -> None:
    args = [randn(2, 6, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 8)]
    rewrite_case(GROUPED["repeat_kv"][0], args, RULES, must_fire=True, layouts=LAYOUTS[:2])
    rewrite_case(GROUPED["written out"][0], args, RULES, must_fire=True, layouts=LAYOUTS[:2])


def test_dropout_in_training_stays() -> None:
    def f(q, k, v):
        return F.dropout((q @ k.mT * 0.3).softmax(-1), 0.5, True) @ v

    code = compiled(f, RULES)
    code.call(*qkv())
    assert fired(code) == {}


# -- clean-ups ------------------------------------------------------------------------------------------

CHANGES_NOTHING: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul": lambda x: x * 1.0,
    "div": lambda x: x / 1,
    "clone": lambda x: x.clone(),
    "alias": lambda x: x[:],
    "slice": lambda x: x[:, 0:4],
    "view": lambda x: x.view(x.shape),
    "view of view": lambda x: x.view(-1).view(3, 4),
    "transposes": lambda x: x.t().t(),
    "expand": lambda x: x.expand(3, 4),
    "cat": lambda x: torch.cat([x]),
    "cat with nothing": lambda x: torch.cat([x, x[:, 4:]], 1),
    "pad": lambda x: F.pad(x, (0, 0)),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "to": lambda x: x.to(torch.float32, copy=True),
}
AROUND: dict[str, Callable[[Any], Callable[[torch.Tensor], Any]]] = {
    "returned": lambda f: lambda x: f(x),
    "of a result": lambda f: lambda x: f(torch.sin(x)),
    "with its source": lambda f: lambda x: ((y := torch.sin(x)), f(y)),
    "twice": lambda f: lambda x: ((y := f(torch.sin(x))), f(y)),
    "a view of it": lambda f: lambda x: f(torch.sin(x)).t(),
    "in between": lambda f: lambda x: torch.cos(f(torch.sin(x))),
    "before a write": lambda f: lambda x: ((y := f(x)), x.add_(1), torch.cos(y))[::2],
    "written": lambda f: lambda x: f(torch.sin(x)).add_(1),
    "a copy written": lambda f: lambda x: ((s := torch.sin(x)), f(s).mul_(2), s)[1:],
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", CHANGES_NOTHING)
def test_what_changes_nothing_keeps_values_and_aliases(name: str, around: str) -> None:
    x = randn(3, 4)
    x[0, 0], x[0, 1], x[0, 2] = -0.0, math.nan, INF
    check(AROUND[around](CHANGES_NOTHING[name]), [x], RULES, tolerance=0.0)


@pytest.mark.parametrize("name", CHANGES_NOTHING)
def test_what_changes_nothing_goes(name: str) -> None:
    code = check(AROUND["in between"](CHANGES_NOTHING[name]), [randn(3, 4)], RULES, tolerance=0.0)
    left = code.records[0].nodes_after
    assert left == 2, f"{left} nodes for cos(sin(x))"


def test_a_sum_with_zero_is_no_clean_up() -> None:
    """-0.0 + 0 is 0.0."""
    code = check(lambda x: torch.cos(torch.sin(x) + 0), [randn(3)], RULES, tolerance=0.0)
    assert code.records[0].nodes_after == 3
    minus = torch.tensor([-0.0])
    result = compiled(lambda x: (x * 1.0 + 0).reciprocal(), RULES).call(minus)
    assert result.item() == INF


def test_a_slice_written_from_another_and_that_then_changed() -> None:
    def f(dst, src):
        dst[0:, :] = src[0:, :]
        src.add_(1)
        return src

    check(f, [torch.zeros(3, 4), torch.arange(12.0).view(3, 4)], RULES)
