"""Target files: extending, merging, and mistakes told at their place."""

import random

import pytest

from sitsopt.spec.errors import SpecError
from sitsopt.spec.target import load_target

PARENT = """\
summary: Parent.
emitter: triton
arch: sm_90
memory: {bandwidth_gbs: 100, size_gb: 8, levels: {l2: {size_kb: 10, per: device}}}
compute: {peak_tflops: {f32: 1, bf16: 2}, features: [a, b]}
sources: [here]
"""


@pytest.fixture
def write(tmp_path):
    (tmp_path / "backends").mkdir()

    def put(name, text):
        file = tmp_path / "backends" / f"{name}.yaml"
        file.write_text(text)
        return file

    put("parent", PARENT)
    return put


def test_maps_merge_lists_replace_null_is_unknown(write, tmp_path):
    write(
        "child",
        "extends: parent\nsummary: Child.\nmemory: {bandwidth_gbs: null, levels: {l2: {size_kb: 20}}}\n"
        "compute: {peak_tflops: {bf16: null, i8: 3}, features: [c]}\nsources: [there]\n",
    )
    child = load_target("child", [tmp_path])
    assert child.memory.bandwidth_gbs is None
    assert child.memory.size_gb == 8
    assert (child.level("l2").size_kb, child.level("l2").per) == (20, "device")
    assert child.peak_tflops("f32") == 1
    assert child.peak_tflops("bf16") is None
    assert child.peak_tflops("i8") == 3
    assert child.compute.features == ["c"]
    assert child.sources == ["there"]


def test_a_users_target_hides_and_extends_the_shipped_one(write, tmp_path):
    write("h100", "extends: h100\nmemory: {bandwidth_gbs: 2000}\n")
    mine = load_target("h100", [tmp_path])
    assert mine.memory.bandwidth_gbs == 2000
    assert mine.compute.units == 132
    assert load_target("h100").memory.bandwidth_gbs == 3350


@pytest.mark.parametrize(
    ("text", "path", "line", "has"),
    [
        ("extends: parnt\n", "", 1, "did you mean `parent`?"),
        ("extends: child\n", "", 1, "no target `child`"),
        (
            "extends: parent\nmemory: {bandwith_gbs: 3}\n",
            "memory.bandwith_gbs",
            2,
            "`bandwidth_gbs`",
        ),
        (
            "extends: parent\nmemory: {bandwith_gbs: null}\n",
            "memory.bandwith_gbs",
            2,
            "`bandwidth_gbs`",
        ),
        ("extends: parent\nmemory: {bandwidth_gbs: 0}\n", "memory.bandwidth_gbs", 2, "above 0"),
        ("extends: parent\nmemory: {bandwidth_gbs: fast}\n", "memory.bandwidth_gbs", 2, "a number"),
        ("extends: parent\nbandwidth_gbs: 3\n", "bandwidth_gbs", 2, "belongs under `memory`"),
        ("extends: parent\nsources: []\n", "sources", 2, "at least 1"),
        ("extends: parent\nemitter: ptx\n", "emitter", 2, "cpp, triton"),
        (
            "extends: parent\npasses: [channel_last]\n",
            "passes[0]",
            2,
            "did you mean `channels_last`?",
        ),
        (
            "extends: parent\ncompute: {peak_tflops: {fp16: 3}}\n",
            "compute.peak_tflops.fp16",
            2,
            "f16",
        ),
        ("extends: parent\ndetect: {device: gpu}\n", "detect.device", 2, "cpu, cuda, hip"),
        ("summary: x\narch: a\nemitter: cpp\n", "sources", 1, "`sources` is missing"),
    ],
)
def test_refuses(text, path, line, has, write, tmp_path):
    file = write("child", text)
    with pytest.raises(SpecError) as caught:
        load_target("child", [tmp_path])
    error = caught.value
    assert (error.pos.file, error.path, error.line) == (str(file), path, line)
    assert has in str(error)


def test_a_circle(write, tmp_path):
    write("one", "extends: two\n")
    write("two", "extends: one\n")
    with pytest.raises(SpecError, match="one > two > one"):
        load_target("one", [tmp_path])


KEYS = {
    (): ["summary", "detect", "emitter", "memory", "compute", "links", "passes", "sources"],
    ("memory",): ["bandwidth_gbs", "size_gb", "levels"],
    ("compute",): ["peak_tflops", "units", "warp", "max_registers", "features"],
    ("links",): ["nvlink_gbs", "xgmi_gbs", "pcie_gbs", "launch_us"],
    ("detect",): ["device", "names", "arch", "flags"],
}


@pytest.mark.parametrize(
    ("path", "key"), [(path, key) for path, keys in KEYS.items() for key in keys]
)
def test_a_typo_names_the_real_key(path, key, write, tmp_path):
    at = random.Random(key).randrange(len(key))
    for typo in (key[:at] + key[at + 1 :], key[:at] + "q" + key[at:], key[1] + key[0] + key[2:]):
        inner = f"{typo}: null\n"
        write(
            "child", "extends: parent\n" + (f"{path[0]}: {{{inner.strip()}}}\n" if path else inner)
        )
        with pytest.raises(SpecError) as caught:
            load_target("child", [tmp_path])
        assert f"`{key}`" in caught.value.hint
