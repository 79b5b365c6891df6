"""Recipes on top of one another: maps merge by key, lists replace, null removes, and every value knows
the file and line that set it."""

import pytest

from sitsopt.spec.errors import SpecError
from sitsopt.spec.recipe import family, load_recipe

BASE = """\
summary: base
exclude:
  fuse/rope: slow
  fuse/qkv: wrong
weights:
- {match: a, scheme: int8}
hooks:
  cpu: {}
kv_cache: {policy: recency, window: 64}
"""


@pytest.fixture
def write(tmp_path):
    """Write a recipe of the folder `tmp_path/recipes`, which is on the search path."""
    (tmp_path / "recipes").mkdir()

    def put(name, text):
        file = tmp_path / "recipes" / f"{name}.yaml"
        file.write_text(text)
        return file

    put("base", BASE)
    return put


def load(spec, tmp_path, *overrides, classes=()):
    return load_recipe(spec, classes, [tmp_path], overrides)


def test_maps_merge_by_key(write, tmp_path):
    write("top", "extends: base\nexclude: {fuse/swiglu: new}\nhooks: {nvlink: {apply: false}}\n")
    recipe = load("top", tmp_path)
    assert recipe.exclude == {"fuse/rope": "slow", "fuse/qkv": "wrong", "fuse/swiglu": "new"}
    assert recipe.as_dict()["hooks"] == {"cpu": {}, "nvlink": {"apply": False}}


def test_lists_replace(write, tmp_path):
    write("top", "extends: base\nweights:\n- {match: b, scheme: fp8}\n")
    assert [weight.match for weight in load("top", tmp_path).weights] == ["b"]


def test_scalars_replace(write, tmp_path):
    write("top", "extends: base\nkv_cache: {window: 8}\n")
    recipe = load("top", tmp_path)
    assert (recipe.kv_cache.policy, recipe.kv_cache.window) == ("recency", 8)


def test_null_removes(write, tmp_path):
    write("top", "extends: base\nexclude: {fuse/rope: null}\nkv_cache: null\nhooks: {cpu: null}\n")
    recipe = load("top", tmp_path)
    assert recipe.exclude == {"fuse/qkv": "wrong"}
    assert recipe.kv_cache is None
    assert recipe.as_dict()["hooks"] == {}


def test_what_was_removed_can_be_set_again(write, tmp_path):
    write("top", "extends: base\nkv_cache: null\n")
    write("topmost", "extends: top\nkv_cache: {policy: int8}\n")
    assert load("topmost", tmp_path).kv_cache.policy == "int8"


def test_null_under_a_key_that_does_not_exist_is_an_error(write, tmp_path):
    write("top", "extends: base\nkv_cash: null\n")
    with pytest.raises(SpecError, match="did you mean `kv_cache`"):
        load("top", tmp_path)


def test_null_that_removes_no_rule_is_an_error(write, tmp_path):
    file = write("top", "extends: base\nexclude: {fuse/ropes: null}\n")
    with pytest.raises(SpecError) as caught:
        load("top", tmp_path)
    assert (caught.value.pos.file, caught.value.line) == (str(file), 2)


def test_later_ones_lie_on_top(write, tmp_path):
    write("one", "profitability: model\nexclude: {fuse/rope: one}\n")
    write("two", "exclude: {fuse/rope: two}\n")
    assert load("one,two", tmp_path).exclude == {"fuse/rope": "two"}
    assert load("two, one", tmp_path).exclude == {"fuse/rope": "one"}
    assert load(["one", {"exclude": {"fuse/rope": "map"}}], tmp_path).exclude["fuse/rope"] == "map"
    assert load("one,two", tmp_path).profitability == "model"
    assert load("one,two", tmp_path).name == "one,two"


def test_a_shared_base_is_laid_once(write, tmp_path):
    write("one", "extends: base\nkv_cache: {window: 1}\n")
    write("two", "extends: base\nhooks: {hbm: {}}\n")
    assert load("one,two", tmp_path).kv_cache.window == 1


def test_every_value_knows_its_file_and_line(write, tmp_path):
    base = tmp_path / "recipes" / "base.yaml"
    top = write("top", "extends: base\nexclude:\n  fuse/rope: other\n")
    recipe = load("top", tmp_path, "kv_cache.window=32")
    assert str(recipe.origin("exclude.fuse/rope")) == f"{top}:3:14"
    assert str(recipe.origin("exclude.fuse/qkv")) == f"{base}:4:13"
    assert str(recipe.origin("weights.0.scheme")) == f"{base}:6:22"
    assert str(recipe.origin(("kv_cache", "policy"))) == f"{base}:9:20"
    assert str(recipe.origin("kv_cache.window")) == "--set kv_cache.window=32:1:17"


def test_an_error_in_the_base_points_into_the_base(write, tmp_path):
    file = write("bad", "weights:\n- {match: a, scheme: int5}\n")
    write("top", "extends: bad\nsummary: x\n")
    with pytest.raises(SpecError) as caught:
        load("top", tmp_path)
    assert str(caught.value.pos) == f"{file}:2:22"


def test_extends_in_a_circle(write, tmp_path):
    write("one", "extends: two\n")
    write("two", "extends: one\n")
    with pytest.raises(SpecError, match="in a circle: one > two > one"):
        load("one", tmp_path)


def test_extending_its_own_name_means_the_one_it_hides(write, tmp_path):
    write("llama", "extends: llama\nprofitability: model\n")
    recipe = load("llama", tmp_path)
    assert recipe.profitability == "model"
    assert "fuse/qkv" in recipe.expect
    write("mine", "extends: mine\n")
    with pytest.raises(SpecError, match="no recipe `mine`"):
        load("mine", tmp_path)


def test_the_nearest_class_wins(write, tmp_path):
    write("mine", "for: [LlamaForCausalLM]\n")
    write("closer", "for: [MyLlama]\n")
    classes = ["MyLlama", "LlamaForCausalLM", "Module"]
    assert family(classes, [tmp_path]) == "closer"
    assert family(classes[1:], [tmp_path]) == "mine"
    assert family(classes[1:]) == "llama"


def test_two_recipes_for_one_class(write, tmp_path):
    write("mine", "for: [A]\n")
    write("yours", "for: [B, A]\n")
    with pytest.raises(SpecError) as caught:
        family(["A"], [tmp_path])
    assert "`mine` and `yours` are for A" in caught.value.problem
    assert caught.value.column == 10


@pytest.mark.parametrize(
    ("spec", "column", "has"),
    [
        ("auto,int5", 15, "did you mean `int4`?"),
        ("auto,,int4", 15, "an empty name"),
        ("", 10, "an empty name"),
        ("../../etc/passwd", 10, "no recipe"),
        ("/etc/passwd", 10, "no recipe"),
        ("nowhere.yaml", 1, "no such file"),
        (3, 1, "is no recipe"),
        ([], 1, "is no recipe"),
    ],
)
def test_a_name_that_means_nothing(spec, column, has):
    with pytest.raises(SpecError) as caught:
        load_recipe(spec)
    assert has in str(caught.value)
    if isinstance(spec, str) and not spec.endswith(".yaml"):
        assert caught.value.pos.file == f"--recipe {spec}"
        assert caught.value.column == column - len("--recipe ")


def test_data_that_is_not_plain():
    with pytest.raises(SpecError, match="not plain data"):
        load_recipe({"summary": object()})


def test_the_entry_for_each_module():
    recipe = load_recipe(
        {
            "weights": [
                {"match": "lm_head", "skip": "x"},
                {"match": "layers.1", "scheme": "int8"},
                {"match": "layers.*", "scheme": "int4"},
            ]
        }
    )
    names = ["layers.0.q", "layers.1.q", "layers.10.q", "lm_head", "other"]
    chosen = {name: weight.scheme for name, weight in recipe.weights_of(names).items()}
    assert chosen == {
        "lm_head": None, "layers.1.q": "int8", "layers.0.q": "int4", "layers.10.q": "int4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("matches", "has", "index"),
    [
        (["layers.*", "layers.1"], "entries above take all", 1),
        (["layer.*"], "did you mean `layers.*`?", 0),
    ],
)
def test_an_entry_for_nothing_is_an_error(matches, has, index):
    recipe = load_recipe({"weights": [{"match": one, "scheme": "int4"} for one in matches]})
    with pytest.raises(SpecError) as caught:
        recipe.weights_of(["layers.0.q", "layers.1.q"])
    assert has in str(caught.value)
