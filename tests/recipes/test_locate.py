"""Where data files are looked for: the option, the variable, the script's project, what is shipped."""

import os
import sys
import types

import pytest

from sitsopt.spec import locate
from sitsopt.spec.errors import Pos, SpecError
from sitsopt.spec.locate import dirs, files, find, rule_dirs, search_path


@pytest.fixture(autouse=True)
def no_project(monkeypatch):
    """The project under test is no search path of its own."""
    monkeypatch.delenv(locate.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))


@pytest.fixture
def folder(tmp_path):
    def make(name, *kinds):
        for kind in kinds or ("recipes",):
            (tmp_path / name / kind).mkdir(parents=True)
        return tmp_path / name

    return make


@pytest.fixture
def script(monkeypatch, tmp_path):
    """A running script with a pyproject.toml one folder above it."""

    def run(text):
        (tmp_path / "project/tools").mkdir(parents=True)
        (tmp_path / "project/pyproject.toml").write_text(text)
        main = types.ModuleType("__main__")
        main.__file__ = str(tmp_path / "project/tools/run.py")
        monkeypatch.setitem(sys.modules, "__main__", main)
        return tmp_path / "project"

    return run


def test_what_is_shipped_is_beside_the_package():
    for kind in ("recipes", "backends"):
        assert dirs(kind) == [locate._PACKAGE.parent / kind]
    assert rule_dirs()[-1].name == "rules"


def test_the_packaged_copy_comes_first(monkeypatch, tmp_path):
    (tmp_path / "_data/recipes").mkdir(parents=True)
    monkeypatch.setattr(locate, "_PACKAGE", tmp_path)
    assert dirs("recipes") == [tmp_path / "_data/recipes"]


def test_the_order(folder, script, monkeypatch):
    option, variable = folder("option"), folder("variable")
    project = script('[tool.sitsopt]\npath = ["mine"]\n')
    (project / "mine/recipes").mkdir(parents=True)
    monkeypatch.setenv(locate.VARIABLE, str(variable))
    assert dirs("recipes", [option])[:-1] == [
        option / "recipes", variable / "recipes", project / "mine/recipes",
    ]  # fmt: skip


def test_the_first_folder_wins(folder):
    one, two = folder("one"), folder("two")
    for place in (one, two):
        (place / "recipes/llama.yaml").write_text("")
    assert find("recipes", "llama", [one, two]) == one / "recipes/llama.yaml"
    assert find("recipes", "llama", [one, two], below=one / "recipes/llama.yaml").is_relative_to(
        two
    )
    assert find("recipes", "llama").name == "llama.yaml"
    assert files("recipes", [two])["llama"] == two / "recipes/llama.yaml"


def test_the_working_directory_adds_nothing(folder, monkeypatch):
    here = folder("here", "rules", "recipes", "backends")
    (here / "pyproject.toml").write_text('[tool.sitsopt]\npath = ["."]\n')
    monkeypatch.chdir(here)
    assert search_path() == []
    monkeypatch.setenv(locate.VARIABLE, os.pathsep)
    assert search_path() == []


def test_a_variable_of_the_working_directory_is_refused(folder, monkeypatch):
    folder("here")
    monkeypatch.setenv(locate.VARIABLE, f"{os.pathsep}here")
    with pytest.raises(SpecError) as caught:
        search_path()
    assert "not absolute" in caught.value.problem
    assert (caught.value.pos.file, caught.value.column) == (locate.VARIABLE, 2)


def test_several_entries(folder, monkeypatch):
    one, two = folder("one"), folder("two", "rules")
    monkeypatch.setenv(locate.VARIABLE, f"{one}{os.pathsep}{two}")
    assert search_path() == [one, two]
    assert dirs("recipes")[:-1] == [one / "recipes"]
    assert rule_dirs()[:-1] == [two / "rules"]


@pytest.mark.parametrize(("name", "has"), [("nowhere", "no folder"), ("empty", "nothing to read")])
def test_an_entry_that_adds_nothing_is_an_error(name, has, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=has):
        dirs("recipes", [tmp_path / name])


@pytest.mark.parametrize(
    ("text", "line", "column", "has"),
    [
        ('[tool.sitsopt]\npath = "mine"\n', 2, 1, "no list"),
        ("[tool.sitsopt]\npath = [3]\n", 2, 1, "no list"),
        ('[tool.sitsopt]\n# a\npaths = ["mine"]\n', 3, 1, "did you mean `path`?"),
        ('[project]\npath = 3\n[tool.sitsopt]\n  path = ["gone"]\n', 4, 3, "no folder"),
        ("[tool.sitsopt\n", 1, 1, "not valid TOML"),
        ("[tool]\nsitsopt = 3\n", 2, 1, "no table"),
    ],
)
def test_mistakes_in_the_project(text, line, column, has, script):
    project = script(text)
    with pytest.raises(SpecError) as caught:
        search_path()
    assert has in str(caught.value)
    where = Pos(str(project / "pyproject.toml"), line, column)
    assert caught.value.pos == where


@pytest.mark.parametrize("text", ["", "[project]\nname = 'x'\n", "[broken\n", "[tool]\n"])
def test_a_project_that_says_nothing_of_it(text, script):
    script(text)
    assert search_path() == []


def test_an_interactive_session_has_no_project():
    assert locate.project_file() is None


@pytest.mark.parametrize(
    "name", ["../llama", "/llama", "llama/../llama", "", ".", "..", "a b", "llama.yaml/", "~", "\0"]
)
def test_a_name_never_leaves_the_folder(name):
    with pytest.raises(SpecError, match="there is no recipe"):
        find("recipes", name)


def test_the_error_is_where_the_name_stands():
    with pytest.raises(SpecError) as caught:
        find("recipes", "lama", pos=Pos("a.yaml", 2, 3))
    assert str(caught.value.pos) == "a.yaml:2:3"
    assert caught.value.hint == "did you mean `llama`?"


def test_names_in_folders(folder):
    place = folder("one", "rules/fuse")
    (place / "rules/fuse/mine.yaml").write_text("")
    assert find("rules", "fuse/mine", [place]) == place / "rules/fuse/mine.yaml"
    assert "fuse/mine" in files("rules", [place])
