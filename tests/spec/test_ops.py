"""What is known of ops, and that PyTorch and the reference ops agree with it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from sitsopt.spec.locate import shipped
from sitsopt.spec.ops import known, resolve, sits_schemas, suggest
from sitsopt.spec.rule import load_rule, rule_files
from sitsopt.spec.signature import REQUIRED, parse_signature

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("add(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
         "(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"),
        ("split(Tensor(a -> *) self, SymInt[] sizes, int dim=0) -> Tensor(a)[]",
         "(Tensor self, int[] sizes, int dim=0) -> Tensor[]"),
        ("f(Tensor x, int[2] s=[1, 1], str m='a,b', float e=1e-5) -> (Tensor, Tensor out)",
         "(Tensor x, int[] s=(1, 1), str m='a,b', float e=1e-05) -> (Tensor, Tensor)"),
        ("f(Tensor(a!) self, bool b=False, Tensor? m=None) -> Tensor(a!)",
         "(Tensor self, bool b=False, Tensor? m=None) -> Tensor"),
        ("f() -> ()", "() -> ()"),
    ],
)  # fmt: skip
def test_schemas_are_read(text, shown):
    signature = parse_signature(text)
    assert str(signature) == shown
    assert parse_signature(str(signature).replace("(1, 1)", "[1, 1]")) == signature


@pytest.mark.parametrize(
    "text", ["", "f", "f(x) -> Tensor", "f(Tensor x)", "f(Tensor 1x) -> Tensor"]
)
def test_schemas_that_are_none(text):
    with pytest.raises(ValueError):
        parse_signature(text)


def test_arguments():
    signature = parse_signature(
        "f(Tensor[] xs, Tensor?[] bs, int[]? dim=None, *, float eps) -> Tensor"
    )
    xs, bs, dim, eps = signature.args
    assert xs.is_list and xs.is_tensor and not xs.takes_none
    assert bs.is_list and bs.is_tensor
    assert dim.takes_none and dim.base == "int" and dim.default is None and not dim.required
    assert eps.keyword_only and eps.default is REQUIRED
    assert signature.positional == (xs, bs, dim)
    assert signature.arg("eps") is eps and signature.arg("no") is None


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("mul", "aten.mul"), ("aten.mul", "aten.mul"), ("aten.mul.Tensor", "aten.mul.Tensor"),
        ("rms_norm", "sits.rms_norm"), ("aten.rms_norm", "aten.rms_norm"), ("cast", "prim.cast"),
        ("aten.silu.default", "aten.silu.default"), ("linear", "aten.linear"),
    ],
)  # fmt: skip
def test_names(name, canonical):
    assert resolve(name).name == canonical
    assert resolve(name).key == ".".join(canonical.split(".")[:2])


@pytest.mark.parametrize(
    "name", ["", ".", "aten", "aten.", "aten.mul.", "sits.mul", "prim.mul", "torch.mul", "aten.mul.Tensr",
             "aten.mul.out", "aten.mul.Tensor.x", "prim.cast.x"],
)  # fmt: skip
def test_names_that_mean_nothing(name):
    assert resolve(name) is None


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("aten.silluu", "aten.silu"), ("sillu", "silu"), ("rope_", "rope"), ("sits.roap", "sits.rope"),
        ("aten.mul.Tensr", "aten.mul.Tensor"), ("aten.silu.x", "aten.silu.default"), ("concatt", "concat"),
    ],
)  # fmt: skip
def test_suggestions(name, nearest):
    assert suggest(name) == nearest


def test_facts():
    add, mul, sub = resolve("aten.add"), resolve("aten.mul.Tensor"), resolve("aten.sub")
    assert add.commutes and dict(add.commutes_when) == {"alpha": 1}
    assert mul.commutes and not mul.commutes_when and not sub.commutes
    assert {resolve(f"aten.{name}").family for name in ("view", "reshape", "_unsafe_view")} == {
        "reshape"
    }
    assert resolve("aten.t").family == resolve("aten.permute").family == "permute"
    assert resolve("cast").family == resolve("aten._to_copy").family == "cast"
    assert resolve("aten.to.dtype").family == "cast" and resolve("aten.to.other").family == ""
    assert resolve("aten.softmax").dims == {"dim"} and resolve("aten.tile").dims == frozenset()
    assert resolve("aten.transpose").dims == {"dim0", "dim1"}
    assert (resolve("aten.unsqueeze").extra_rank, resolve("aten.squeeze").extra_rank) == (1, 0)
    assert resolve("aten.split").results == ("Tensor[]",)
    assert resolve("aten.max").results is None  # with a dim it has two
    assert "aten.silu" in known() and "prim.cast" in known() and "aten.silu_" not in known()


def test_ops_that_write_name_the_op_that_does_not():
    fact = resolve("aten.add_")
    assert fact.writes and fact.functional == "aten.add" and "Tensor" in fact.overloads
    assert resolve("aten.copy_").writes
    assert not resolve("aten.add").writes


def table():
    spec = importlib.util.spec_from_file_location("op_table", HERE / "op_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def used_ops():
    """Every aten op that a shipped rule names, and those that the handbook does."""
    used = {
        "aten.mul",
        "aten.add",
        "aten.silu",
        "aten.linear",
        "aten.split",
        "aten.view",
        "aten.layer_norm",
    }
    for rule_id, paths in rule_files([shipped("rules")]).items():
        rule = load_rule(paths[0], rule_id)
        programs = [spelling.program for spelling in rule.spellings]
        programs += [one.replace for one in (rule, *rule.spellings) if one.replace]
        programs += [*rule.fold.values(), *(one.given for one in rule.examples if one.given)]
        used |= {resolve(let.call.op).key for program in programs for let in program.lets}
    return sorted(name for name in used if name.startswith("aten.") and not resolve(name).writes)


def test_pytorch_agrees_on_the_ops_that_rules_use():
    module = table()
    here = json.loads(module.TABLE.read_text())["ops"]
    there = module.table()["ops"]
    for name in used_ops():
        packet = name.removeprefix("aten.")
        for overload, schema in here[packet].items():
            if overload in there.get(packet, {}):
                assert there[packet][overload] == schema, (
                    f"{name}.{overload}: run {module.__file__}"
                )
        assert set(here[packet]) & set(there.get(packet, {})), f"PyTorch has no {name}"


def test_the_table_is_that_of_the_pytorch_it_was_made_with():
    import torch

    if not torch.__version__.startswith("2.13."):
        pytest.skip("the table is generated with PyTorch 2.13")
    module = table()
    assert module.dump(module.table()) == module.TABLE.read_text(), f"run {module.__file__}"


def test_the_reference_ops_have_the_schemas_that_rules_see():
    import torch

    from sitsopt.graph import ops  # noqa: F401  registers the sits:: ops

    for name, schema in sits_schemas().items():
        packet = getattr(torch.ops.sits, name)
        registered = str(packet.default._schema).removeprefix("sits::")
        assert str(parse_signature(registered)) == str(parse_signature(schema)), name
