"""Which target a machine is, from what a fake /proc and /sys say and from fake GPUs."""

import json
import sys
import types

import pytest

from sitsopt.runtime import machine
from sitsopt.runtime.machine import FLAGS, Gpu, Machine, facts, target_of

AVX2 = "fpu sse sse2 avx f16c fma avx2"
AVX512 = AVX2 + " avx512f avx512dq avx512cd avx512bw avx512vl"
AMX = AVX512 + " avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8"


@pytest.fixture
def fake(tmp_path):
    """A root with `proc/cpuinfo` and, for two cores, the caches of `sys`."""

    def build(cpuinfo=None, caches=()):
        if cpuinfo is not None:
            (tmp_path / "proc").mkdir()
            (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
        for core in (0, 1):
            for index, (level, kind, size, shared) in enumerate(caches):
                folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
                folder.mkdir(parents=True)
                (folder / "level").write_text(f"{level}\n")
                (folder / "type").write_text(f"{kind}\n")
                (folder / "size").write_text(f"{size}\n")
                (folder / "shared_cpu_list").write_text(shared.format(core=core) + "\n")
        return tmp_path

    return build


def cpuinfo(flags, model="Some CPU"):
    core = "processor\t: {}\nmodel name\t: " + model + "\nflags\t\t: " + flags + "\n\n"
    return core.format(0) + core.format(1)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu sse", "cpu"),
        ("fpu avx avx2", "cpu"),
        (AVX2, "cpu-avx2"),
        (AVX2 + " avx512f", "cpu-avx2"),
        (AVX512, "cpu-avx512"),
        (AVX512 + " avx512_vnni avx512_bf16", "cpu-avx512"),
        (AVX512 + " amx_tile", "cpu-avx512"),
        (AMX, "cpu-amx"),
    ],
)
def test_the_flags_decide_the_cpu_target(flags, name, fake):
    assert target_of(facts(fake(cpuinfo(flags))), "cpu").name == name


def test_facts_of_a_cpu(fake):
    root = fake(
        cpuinfo(AMX, "Xeon"),
        [(1, "Data", "48K", "{core}"), (1, "Instruction", "32K", "{core}"),
         (2, "Unified", "2048K", "{core}"), (3, "Unified", "105M", "0-1")],
    )  # fmt: skip
    found = facts(root)
    assert found.cpu == "Xeon"
    assert "amx_tile" in found.flags
    assert "sse" not in found.flags
    assert (found.l1d_kb, found.l2_kb, found.l3_kb) == (48, 2048, 105 * 1024)


def test_l3_caches_of_several_dies_add_up(fake):
    root = fake(cpuinfo(AVX2), [(3, "Unified", "32M", "{core}")])
    assert facts(root).l3_kb == 64 * 1024


@pytest.mark.parametrize("text", [None, "", "garbage", "flags:", "\x00\xff", "flags\t\t: "])
def test_a_machine_that_says_nothing(text, fake):
    found = facts(fake(text))
    assert not found.flags
    assert found.l2_kb is None
    assert target_of(found, "cpu").name == "cpu"
    json.dumps(found.as_dict())


def test_arm(fake):
    found = facts(fake("processor : 0\nFeatures : fp asimd sve\nCPU part : 0xd40\n"))
    assert found.flags == ()
    assert target_of(found, "cpu").name == "cpu"


def test_broken_cache_files(fake):
    found = facts(fake(cpuinfo(AVX2), [("x", "Data", "big", ""), (2, "Unified", "", "")]))
    assert (found.l1d_kb, found.l2_kb, found.l3_kb) == (None, None, None)


def gpu(name, arch, device="cuda"):
    return Machine(flags=("avx2",), gpus=(Gpu(0, device, name, arch),))


@pytest.mark.parametrize(
    ("name", "arch", "device", "target"),
    [
        ("NVIDIA H200", "sm_90", "cuda", "h200"),
        ("NVIDIA H100 80GB HBM3", "sm_90", "cuda", "h100"),
        ("NVIDIA H100 PCIe", "sm_90", "cuda", "cuda"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "sm_90", "cuda", "cuda"),
        ("NVIDIA A100-SXM4-80GB", "sm_80", "cuda", "a100"),
        ("NVIDIA A100-SXM4-40GB", "sm_80", "cuda", "cuda"),
        ("NVIDIA B200", "sm_100", "cuda", "b200"),
        ("NVIDIA GeForce RTX 4090", "sm_89", "cuda", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "sm_89", "cuda", "cuda"),
        ("NVIDIA GeForce RTX 5090", "sm_120", "cuda", "rtx5090"),
        ("AMD Instinct MI300X", "gfx942", "hip", "mi300x"),
        ("AMD Instinct MI250X", "gfx90a", "hip", "rocm"),
        (None, None, "cuda", "cuda"),
    ],
)
def test_a_gpu_is_known_by_its_exact_name(name, arch, device, target):
    assert target_of(gpu(name, arch, device)).name == target


def test_a_gpu_can_be_passed_over():
    assert target_of(gpu("NVIDIA H200", "sm_90"), "cpu").emitter == "cpp"


class FakeCuda:
    """torch.cuda with two devices, in which one call may fail."""

    def __init__(self, fails=""):
        self.fails = fails

    def _answer(self, call, value):
        if call == self.fails:
            raise RuntimeError(f"{call}: NotSupported")
        return value

    def is_available(self):
        return self._answer("is_available", True)

    def device_count(self):
        return self._answer("device_count", 2)

    def get_device_properties(self, index):
        known = types.SimpleNamespace(
            name="NVIDIA H200",
            major=9,
            minor=0,
            total_memory=150_000_000_000,
            multi_processor_count=132,
        )
        return self._answer(f"get_device_properties {index}", known)


@pytest.mark.parametrize(
    ("fails", "names"),
    [
        ("", ["NVIDIA H200", "NVIDIA H200"]),
        ("is_available", []),
        ("device_count", []),
        ("get_device_properties 0", [None, "NVIDIA H200"]),
        ("get_device_properties 1", ["NVIDIA H200", None]),
    ],
)
def test_each_question_fails_alone(fails, names, monkeypatch, fake):
    torch = types.SimpleNamespace(cuda=FakeCuda(fails), version=types.SimpleNamespace(hip=None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = facts(fake(cpuinfo(AVX2)))
    assert [one.name for one in found.gpus] == names
    assert found.cpu == "Some CPU"
    if names and names[0]:
        assert found.gpus[0] == Gpu(0, "cuda", "NVIDIA H200", "sm_90", 150.0, 132)


def test_a_failing_library_leaves_the_rest(monkeypatch, fake):
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(machine, "_cores", lambda: 1 / 0)
    found = facts(fake(cpuinfo(AVX2)))
    assert (found.memory_gb, found.cores) == (None, None)
    assert found.cpu == "Some CPU"


def test_this_machine():
    found = facts()
    assert set(found.flags or ()) <= set(FLAGS)
    json.dumps(found.as_dict())
    assert target_of(found, "cpu").emitter == "cpp"


def test_the_machines_own_facts_are_filled_in(monkeypatch, tmp_path):
    monkeypatch.setenv("SITSOPT_CACHE", str(tmp_path))
    target = machine.detect_target("cpu")
    assert target.memory.bandwidth_gbs is None
    assert target.compute.units == facts().cores
    assert target.links.launch_us
    assert target.name.startswith("cpu")
