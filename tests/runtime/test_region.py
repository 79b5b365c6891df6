"""A decode step as one generated function: as right as op by op, and safe from threads, forks and other sizes."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

import sitsopt
from sitsopt.explain.text import as_text
from sitsopt.rewrite.record import OneFunction
from sitsopt.runtime import kernels, stopwatch
from sitsopt.runtime.region import choose
from sitsopt.runtime.region.compiled import Region
from sitsopt.runtime.region.plan import plan
from sitsopt.runtime.region.scope import Unsupported

pytestmark = pytest.mark.skipif(
    not kernels.availability()[0], reason=f"no kernels here: {kernels.availability()[1]}"
)

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
CLOSE = {"f32": 1e-5, "bf16": 0.03}
DECODE = {"regions": {"use": ["decode"]}, "profitability": "always"}


def model_of(kind: str, dtype: str, seed: int = 0) -> Any:
    import transformers as hf

    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": 3, "vocab_size": 200, "max_position_embeddings": 512}
    wide: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, **sizes}
    if kind == "llama":
        config = hf.LlamaConfig(num_attention_heads=8, num_key_value_heads=2, **wide)
        model: Any = hf.LlamaForCausalLM(config)
    elif kind == "gemma":
        wide |= {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 16}
        config = hf.Gemma3TextConfig(num_attention_heads=4, num_key_value_heads=1, **wide)
        model = hf.Gemma3ForCausalLM(config)
    else:
        model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=96, n_layer=3, n_head=6, vocab_size=200))
    return model.to(DTYPES[dtype]).eval()


class Both:
    """In place of the choice: runs both ways at every call, on copies of what they write, and keeps how far apart
    they were."""

    def __init__(self) -> None:
        self.worst, self.steps, self.whys = 0.0, 0, list[str]()

    def __call__(self, gm: Any, values: Any, profitability: str, op_by_op: Any) -> Any:
        try:
            planned = plan(gm)
        except Unsupported as error:
            self.whys.append(str(error))
            return gm.forward, OneFunction(False, str(error))
        region = Region(planned)
        places = [p for p, f in zip(planned.places, planned.arguments, strict=False) if f[3]]

        def call(*args: Any) -> Any:
            mine = [a.clone() if i in places else a for i, a in enumerate(args)]
            with torch.no_grad():
                got = region(*mine)
                want = gm.forward(*args)
            self.steps += 1
            for a, b in [*zip(got, want, strict=True), *((mine[i], args[i]) for i in places)]:
                self.compare(a, b)
            return want

        return call, OneFunction(True, "", planned.ops)

    def compare(self, got: Any, want: Any) -> None:
        if not isinstance(want, torch.Tensor):
            assert got == want
            return
        if want.dtype == torch.uint8:  # a packed cache: tokens of this step, and notes on its tiles
            assert (got != want).double().mean() < 0.01
            return
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        far = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-6)
        self.worst = max(self.worst, float(far))


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    torch._dynamo.reset()
    made = Both()
    monkeypatch.setattr("sitsopt.runtime.lower.chosen", made)
    return made


SLOW = pytest.mark.slow
CASES = [
    ("llama", "bf16", "auto"),
    ("llama", "f32", "auto"),
    ("llama", "bf16", "auto,int4"),
    ("gemma", "bf16", "auto"),
    ("gpt2", "f32", "auto"),
    pytest.param("llama", "f32", "auto,int8", marks=SLOW),
    pytest.param("llama", "bf16", "auto,fp8", marks=SLOW),
    pytest.param("gemma", "f32", "auto", marks=SLOW),
    pytest.param("gpt2", "bf16", "auto", marks=SLOW),
]


@pytest.mark.parametrize(("kind", "dtype", "recipe"), CASES)
def test_every_step_is_as_op_by_op(both: Both, kind: str, dtype: str, recipe: str) -> None:
    model = model_of(kind, dtype)
    sitsopt.optimize(model, recipe=[recipe, DECODE])
    ids = torch.randint(0, 200, (1, 13 if kind == "gemma" else 9))  # its windows of 16 fill up
    model.generate(ids, max_new_tokens=7, do_sample=False)
    assert both.steps == 6
    assert both.worst < CLOSE[dtype]
    (why,) = both.whys  # of the prefill
    assert "index_copy" in why or "rows" in why


@pytest.mark.parametrize("dtype", [pytest.param("f32", marks=SLOW), "bf16"])
def test_a_packed_cache_is_one_function_too(both: Both, dtype: str) -> None:
    model = model_of("llama", dtype)
    cache = {"policy": "hotness-aware", "bits": 4, "window": 64, "sinks": 4, "max_seq_len": 512}
    sitsopt.optimize(model, recipe=["auto", DECODE, {"kv_cache": cache}])
    model.generate(torch.randint(0, 200, (1, 125)), max_new_tokens=8, do_sample=False)
    assert both.steps == 7  # at the fourth a tile gets old
    assert both.worst < CLOSE[dtype]
    (why,) = both.whys  # of the prefill
    assert "rows" in why or "tokens at once" in why


class Head(nn.Module):
    """A step with nothing but a norm and a product."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.out = nn.Linear(width, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.out(self.norm(x))) + 1.0


def step_of(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, OneFunction | None]:
    """A module compiled as a decode step, and how it runs."""
    torch._dynamo.reset()
    asked = {"recipe": [DECODE], **options}
    run = torch.compile(model, backend="sits", options=asked, dynamic=False)
    with torch.no_grad():
        run(*args)
    return run, sitsopt.report(model).record.graphs[-1].one_function


@torch.no_grad()
def test_it_runs_and_explain_says_so() -> None:
    model, x = Head(), torch.randn(3, 64)
    run, one = step_of(model, x)
    assert one is not None and one.used and one.ops >= 3
    torch.testing.assert_close(run(x), model(x))
    assert "one generated function" in as_text(sitsopt.report(model))
    told = sitsopt.report(model).json()["graphs"][-1]["one_function"]
    assert told["used"] and told["ops"] == one.ops


class Strange(Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).cumsum(-1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "rows", "why"),
    [(Strange(), 3, "aten.cumsum is none of a region's ops"), (Head(), 40, "40 rows")],
)
def test_what_it_cannot_take_runs_op_by_op(model: nn.Module, rows: int, why: str) -> None:
    x = torch.randn(rows, 64)
    run, one = step_of(model, x)
    assert one is not None and not one.used and why in one.why
    torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_without_the_recipe_nothing_changes() -> None:
    model, x = Head(), torch.randn(3, 64)
    torch._dynamo.reset()
    torch.compile(model, backend="sits")(x)
    assert sitsopt.report(model).record.graphs[-1].one_function is None


@torch.no_grad()
@pytest.mark.parametrize(("ours", "theirs"), [(10.0, 25.0), (25.0, 10.0)])
def test_the_faster_way_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, ours: float, theirs: float
) -> None:
    kernels.availability()
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path))
    races = []

    def race(contenders: Any, device: str) -> Any:
        for calls in contenders:
            calls[0]()
        races.append(contenders)
        return [stopwatch.Lap(ours, True), stopwatch.Lap(theirs, True)]

    monkeypatch.setattr(choose.stopwatch, "race", race)
    model, x = Head(), torch.randn(3, 64)
    for _ in range(2):  # the second time from what was noted
        run, one = step_of(model, x, set=["profitability=measure"])
        assert one is not None and one.used == (ours < theirs)
        assert one.measured_us == {"one function": ours, "op by op": theirs}
        torch.testing.assert_close(run(x), model(x))
    assert len([r for r in races if len(r) == 2 and len(r[0]) == 1]) >= 1


def region_of(model: nn.Module, *args: Any) -> tuple[Region, list[Any]]:
    """The region itself, from a module's graph, and what it takes."""
    found: list[tuple[Region, list[Any]]] = []

    def keep(gm: Any, values: Any, profitability: str, op_by_op: Any) -> Any:
        found.append((Region(plan(gm)), list(values)))
        return found[-1][0], OneFunction(True, "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sitsopt.runtime.lower.chosen", keep)
        step_of(model, *args)
    return found[-1]


@torch.no_grad()
def test_it_goes_to_another_process_and_refuses_other_tensors() -> None:
    model, x = Head(), torch.randn(3, 64)
    region = pickle.loads(pickle.dumps(region_of(model, x)[0].serialize()))
    facts = region.planned.arguments
    given = [torch.randn(f[1]) for f in facts]
    assert torch.isfinite(region(*given)[0]).all()
    with pytest.raises(RuntimeError, match="it was made for"):
        region(*(g.double() for g in given))
    with pytest.raises(RuntimeError, match="it was made for"):
        region(*(g.unsqueeze(0) for g in given))


class Table(Head):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.table(x))


@torch.no_grad()
def test_an_index_out_of_range_is_told() -> None:
    model, x = Table(), torch.tensor([[3], [9]])
    run, one = step_of(model, x)
    assert one is not None and one.used
    torch.testing.assert_close(run(x), model(x))
    for bad in (10, -1):
        with pytest.raises(IndexError):
            run(torch.tensor([[3], [bad]]))
    torch.testing.assert_close(run(x), model(x))


class Deep(nn.Module):
    """Products that wait for each other: a barrier before each but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


@torch.no_grad()
def test_threads_forks_and_team_sizes() -> None:
    models = [Deep(), Deep()]
    xs = [torch.randn(2, 64), torch.randn(5, 64)]
    regions = [region_of(m, x) for m, x in zip(models, xs, strict=True)]
    assert all(r.planned.text.count("BARRIER\n") >= 7 for r, _ in regions)
    wanted = [m(x) for m, x in zip(models, xs, strict=True)]
    before, right = torch.get_num_threads(), [0, 0]

    def is_right(i: int) -> bool:
        region, given = regions[i]
        with torch.no_grad():
            return torch.allclose(region(*given)[0], wanted[i], atol=1e-5)

    def work(i: int) -> None:
        for turn in range(200):  # on a team of each size, while the other's is of another
            torch.set_num_threads(1 + (turn + i) % 4)
            right[i] += is_right(i)

    try:
        for count in (1, 2, 4, 3):  # more than there are cores too
            torch.set_num_threads(count)
            assert is_right(0) and is_right(1)
        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert right == [200, 200]
        child = os.fork()
        if child == 0:
            os._exit(0 if is_right(0) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)
