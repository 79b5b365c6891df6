"""Options, modes and arguments of torch.compile: honoured, reported, or refused in clear words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sitsopt
from sitsopt.options import Options
from sitsopt.pipeline import LoweringError
from sitsopt.planning import ExpectationError
from sitsopt.session import sessions_of
from sitsopt.spec.errors import SpecError
from tests.backend.support import ConvNet, Mlp, fired, graphs, raised, sits

X = torch.randn(3, 16)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"recpie": "auto"}, ["recpie", "recipe"]),
        ({"lowering": "inductr"}, ["inductr", "inductor"]),
        ({"lowering": 3}, ["lowering"]),
        ({"strict": "yes"}, ["strict", "true or false"]),
        ({"recipe": "lama"}, ["lama", "llama"]),
        ({"recipe": {"expct": {}}}, ["expct", "expect"]),
        ({"recipe": {"exclude": {"fuse/swiglo": "why"}}}, ["fuse/swiglo", "fuse/swiglu"]),
        ({"recipe": 7}, ["recipe"]),
        ({"target": "h1000"}, ["h1000", "h100"]),
        ({"path": ["/no/such/folder"]}, ["/no/such/folder"]),
        ({"path": 5}, ["path"]),
        ({"set": "weights"}, ["weights"]),
        ({"inductor": "fast"}, ["inductor"]),
        ({"only": "fuse/swiglu"}, ["only"]),
        ({1: 2}, ["1"]),
    ],
)
def test_a_mistake_is_raised_as_itself(options: dict[Any, Any], words: list[str]) -> None:
    error = raised(sits(Mlp(), **{str(k): v for k, v in options.items()}), X)
    assert type(error) is SpecError or isinstance(error, SpecError), repr(error)
    assert all(word in str(error) for word in words), str(error)


def test_a_mistake_is_raised_at_every_call() -> None:
    run = sits(Mlp(), recipe="lama")
    for _ in range(3):
        assert isinstance(raised(run, X), SpecError)


def test_options_are_checked_where_they_are_parsed() -> None:
    assert Options.parse(None) == Options()
    assert Options.parse({"path": "a", "set": "b=1"}).path == (Path("a"),)
    for bad in ({"explain": 1}, {"exclude": "x"}, {"recipe": b"x"}, {"target": None}):
        with pytest.raises(SpecError):
            Options.parse(bad)


def test_without_options() -> None:
    model = Mlp()
    with torch.no_grad():
        out = torch.compile(model, backend="sits")(X)
        torch.testing.assert_close(out, model(X), rtol=1e-4, atol=1e-4)
    assert fired(model)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    model = Mlp()
    with torch.no_grad():
        out = torch.compile(model, backend="sits", mode=mode)(X)
        torch.testing.assert_close(out, model(X), rtol=1e-4, atol=1e-4)


def test_a_mode_that_does_not_exist() -> None:
    error = raised(lambda: torch.compile(Mlp(), backend="sits", mode="fastest")(X))
    assert error is not None and "fastest" in str(error)


def test_fullgraph() -> None:
    def breaks(x):
        y = x * 2
        print(end="")
        return y + 1

    torch.testing.assert_close(sits(breaks)(X), breaks(X))
    torch._dynamo.reset()
    assert raised(sits(breaks, torch_options={"fullgraph": True}), X) is not None
    torch._dynamo.reset()
    model = Mlp()
    torch.testing.assert_close(sits(model, torch_options={"fullgraph": True})(X), model(X))


def test_disabled() -> None:
    model = Mlp()
    torch.testing.assert_close(sits(model, torch_options={"disable": True})(X), model(X))
    assert not graphs(model)


def test_a_guard_filter_belongs_to_torch_compile() -> None:
    model, seen = Mlp(), []

    def keep_all(guards):
        seen.append(len(guards))
        return [True] * len(guards)

    with torch.no_grad():
        run = sits(model, guard_filter_fn=keep_all)
        torch.testing.assert_close(run(X), model(X))
    assert seen and fired(model)


def test_settings_of_inductor_are_passed_on() -> None:
    model = Mlp()
    with torch.no_grad():
        run = sits(model, "inductor", inductor={"epilogue_fusion": False})
        torch.testing.assert_close(run(X), model(X), rtol=1e-4, atol=1e-4)
        torch._dynamo.reset()
        error = raised(sits(model, "inductor", strict=True, inductor={"no_such_setting": 1}), X)
    assert error is not None and "no_such_setting" in str(error)


def test_only_and_exclude() -> None:
    model = Mlp()
    with torch.no_grad():
        sits(model)(X)
        keys = [s.key for g in graphs(model) for s in g.sites]
        assert len(keys) > 1
        torch._dynamo.reset()
        torch.testing.assert_close(sits(model, exclude=keys)(X), model(X))
        assert not {s.key for s in graphs(model)[-1].sites} & set(keys)
        torch._dynamo.reset()
        torch.testing.assert_close(sits(model, only=keys[:1])(X), model(X))
        assert [s.key for s in graphs(model)[-1].sites] == keys[:1]


def test_a_rule_that_the_recipe_excludes() -> None:
    model = Mlp()
    recipe = {"exclude": {"fuse/swiglu": "a test"}}
    with torch.no_grad():
        sits(model, recipe=recipe)(X)
    assert "fuse/swiglu" not in fired(model)
    effective = [e for s in sessions_of(model) for e in s.record.effective]
    assert any("fuse/swiglu" in e.asked and "a test" in e.reason for e in effective)


def test_a_rule_from_a_folder_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "rules" / "fuse"
    folder.mkdir(parents=True)
    (folder / "double.yaml").write_text("""\
summary: x + x is 2 x.
inputs: {x: "T[*B]"}
match: return aten.add(x, x)
replace: return aten.mul(x, 2)
examples:
  - fires: {T: f32, B: [2]}
""")

    def f(x):
        return x + x

    torch.testing.assert_close(sits(f, path=[str(tmp_path)])(X), f(X))
    assert fired(f) == {"fuse/double"}


def test_strict_refuses_what_cannot_be_captured() -> None:
    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.t()

    torch.testing.assert_close(sits(f)(X), f(X))
    assert "autocast" in graphs(f)[0].fallback
    effective = [e for s in sessions_of(f) for e in s.record.effective]
    assert any("autocast" in e.reason for e in effective)
    torch._dynamo.reset()
    error = raised(sits(f, strict=True), X)
    assert type(error) is LoweringError and "autocast" in str(error)


def test_what_inductor_cannot_compile_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as inductor

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(inductor, "compile_fx", broken)
    model = Mlp()
    with torch.no_grad():
        torch.testing.assert_close(sits(model, "inductor")(X), model(X))
    assert "no compiler today" in graphs(model)[0].fallback
    assert {s.lowered for s in graphs(model)[0].sites} == {"undone"}
    torch._dynamo.reset()
    with torch.no_grad():
        error = raised(sits(model, "inductor", strict=True), X)
    assert type(error) is LoweringError and "no compiler today" in str(error)


def test_an_expectation_that_is_not_met() -> None:
    class Configured(Mlp):
        config = type("Config", (), {"num_hidden_layers": 2})()

    model = Configured()
    with torch.no_grad():
        error = raised(sits(model, recipe={"expect": {"fuse/swiglu": 5}}), X)
        assert type(error) is ExpectationError and "fuse/swiglu" in str(error)
        torch._dynamo.reset()
        model = Configured()
        torch.testing.assert_close(sits(model, recipe={"expect": {"fuse/swiglu": 1}})(X), model(X))


def test_the_report_tells_of_a_fallback() -> None:
    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.t()

    sits(f)(X)
    text = str(sitsopt.report(f))
    assert "autocast" in text


def test_the_report_of_a_compiled_model() -> None:
    model = ConvNet().eval()
    run = sits(model)
    with torch.no_grad():
        run(torch.randn(2, 3, 8, 8))
    for asked in (model, run):
        assert "fold/conv_bn" in str(sitsopt.report(asked))


def test_settings_the_backend_does_not_have_are_reported() -> None:
    from sitsopt.backend import sits as backend

    model = Mlp()
    with torch.no_grad():
        run = torch.compile(
            model, backend=lambda gm, x: backend(gm, x, options={"lowering": "eager"}, fancy=1)
        )
        torch.testing.assert_close(run(X), model(X))
    assert any("fancy=1" in e.asked for s in sessions_of(model) for e in s.record.effective)
