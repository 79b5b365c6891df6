"""Every target that is shipped: it loads, its facts are possible, and each has a source."""

import pytest

from sitsopt.spec.errors import SpecError
from sitsopt.spec.target import all_targets, load_target

TARGETS = {target.name: target for target in all_targets()}
BASES = {"cuda", "rocm"}
GPUS = {name for name, target in TARGETS.items() if target.emitter == "triton"} - BASES
CPUS = {name for name, target in TARGETS.items() if target.emitter == "cpp"}


def test_all_are_there():
    assert CPUS == {"cpu", "cpu-avx2", "cpu-avx512", "cpu-amx"}
    assert GPUS == {"a100", "h100", "h200", "b200", "rtx4090", "rtx5090", "mi300x"}


@pytest.mark.parametrize("name", TARGETS)
def test_says_what_it_is_and_where_that_comes_from(name):
    target = TARGETS[name]
    assert target.summary.endswith(".")
    assert target.sources
    assert target.detect is not None
    assert target.detect.device in ("cpu", "cuda", "hip")


@pytest.mark.parametrize("name", sorted(GPUS))
def test_the_facts_of_a_gpu_are_possible(name):
    target = TARGETS[name]
    memory, compute = target.memory, target.compute
    assert 500 < memory.bandwidth_gbs < 20_000
    assert 16 <= memory.size_gb <= 512
    shared = target.level("shared")
    assert 0 < shared.per_block_kb <= shared.size_kb <= 256
    assert target.level("l2").size_kb >= 1024
    assert target.peak_tflops("f32") > 10
    assert target.peak_tflops("f16") == target.peak_tflops("bf16") > target.peak_tflops("f32")
    assert 64 <= compute.units <= 512
    assert compute.max_threads_per_unit % compute.warp == 0
    assert target.links.pcie_gbs in (64, 128)
    assert target.triton is not None


@pytest.mark.parametrize("name", sorted(GPUS))
def test_every_section_of_a_gpu_has_a_source(name):
    told = " ".join(TARGETS[name].sources)
    if "everything else" in told:
        return
    for section in ("memory", "compute", "links"):
        assert section in told


@pytest.mark.parametrize("name", sorted(CPUS))
def test_what_depends_on_the_board_is_left_to_the_machine(name):
    target = TARGETS[name]
    assert target.memory.bandwidth_gbs is None
    assert target.compute.peak_tflops is None
    assert target.triton is None
    assert target.links.launch_us > 0


def test_a_cpu_target_asks_for_the_code_it_generates():
    for name in sorted(CPUS - {"cpu"}):
        assert TARGETS[name].compute.features == TARGETS[name].detect.flags


@pytest.mark.parametrize(
    ("name", "triton"),
    [
        ("a100", ("cuda", 80, 32)),
        ("rtx4090", ("cuda", 89, 32)),
        ("h200", ("cuda", 90, 32)),
        ("b200", ("cuda", 100, 32)),
        ("rtx5090", ("cuda", 120, 32)),
        ("mi300x", ("hip", "gfx942", 64)),
    ],
)
def test_what_triton_compiles_for(name, triton):
    assert TARGETS[name].triton == triton


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("sm_80", "a100"),
        ("sm_90", "h100"),
        ("sm_100", "b200"),
        ("sm_120", "rtx5090"),
        ("gfx942", "mi300x"),
    ],
)
def test_an_architecture_means_a_target(arch, name):
    assert load_target(arch).name == name


def test_what_is_inherited_knows_where_it_stands():
    h200 = TARGETS["h200"]
    assert h200.origin(("memory", "bandwidth_gbs")).file.endswith("h200.yaml")
    assert h200.origin(("compute", "units")).file.endswith("h100.yaml")
    assert h200.origin(("links", "launch_us")).file.endswith("cuda.yaml")
    assert h200.peak_tflops("f8e4m3") == TARGETS["h100"].peak_tflops("f8e4m3")


@pytest.mark.parametrize(
    ("name", "hint"), [("h10", "h100"), ("mi300", "mi300x"), ("sm_91", "sm_90")]
)
def test_an_unknown_name(name, hint):
    with pytest.raises(SpecError) as caught:
        load_target(name)
    assert f"`{hint}`" in caught.value.hint


def test_plain_data_holds_what_is_unknown():
    data = TARGETS["mi300x"].as_dict()
    assert data["id"] == "mi300x"
    assert data["links"]["launch_us"] is None
