"""What is applied is given back: at the end of a block, of the process, at an error, at a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sitsopt.runtime.hooks import Action, Facts, Ledger, Plan, Settings, Wanted, plan_hooks
from sitsopt.runtime.hooks.plan import Hook
from tests.hooks.fakes import host

NAME = "SITSOPT_TEST_SETTING"


@pytest.fixture
def machine(tmp_path: Path):
    return host(tmp_path, None, files={"/proc/sys/kernel/numa_balancing": "1"})


def test_a_block_gives_back(machine, monkeypatch) -> None:
    monkeypatch.setenv(NAME, "before")
    monkeypatch.delenv("SITSOPT_TEST_OTHER", raising=False)
    file, cpus = machine.path("/proc/sys/kernel/numa_balancing"), sorted(os.sched_getaffinity(0))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with Ledger(machine, ("process", "system")) as ledger:
        for key, value in (
            (f"env:{NAME}", "after"), ("env:SITSOPT_TEST_OTHER", "new"), ("affinity", cpus[:1]),
            ("file:/proc/sys/kernel/numa_balancing", 0),
        ):  # fmt: skip
            scope = "system" if key.startswith("file") else "process"
            assert ledger.apply(Action(key, value, "a test", scope), "test") or (
                key == "affinity" and len(cpus) == 1
            )
        assert os.environ[NAME] == "after" and os.environ["SITSOPT_TEST_OTHER"] == "new"
        assert sorted(os.sched_getaffinity(0)) == cpus[:1] and file.read_text().strip() == "0"
        assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]
    assert os.environ[NAME] == "before" and "SITSOPT_TEST_OTHER" not in os.environ
    assert sorted(os.sched_getaffinity(0)) == cpus and file.read_text().strip() == "1"
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert not ledger.applied and not ledger.left


def test_a_dry_run_touches_nothing(machine) -> None:
    before = (dict(os.environ), machine.path("/proc/sys/kernel/numa_balancing").read_text())
    ledger = Ledger(machine)
    assert not ledger.apply(Action("file:/proc/sys/kernel/numa_balancing", 0, "", "system"), "test")
    assert not ledger.apply(Action(f"env:{NAME}", 1, "", "start"), "test")
    assert [refused.why.partition(":")[0] for _, refused in ledger.refused] == [
        "it concerns other processes too", "it is read once, when a process starts",
    ]  # fmt: skip
    assert (dict(os.environ), machine.path("/proc/sys/kernel/numa_balancing").read_text()) == before


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("affinity", [4095], "Invalid argument"),
        ("file:/proc/sys/kernel/not_there", 1, "No such file"),
        ("what:ever", 1, "nothing is known of `what:ever`"),
        ("affinity", sorted(os.sched_getaffinity(0)), "it is so already"),
    ],
)
def test_what_cannot_be_set_is_said(key: str, value: object, why: str, machine) -> None:
    with Ledger(machine, ("process", "system")) as ledger:
        assert not ledger.apply(Action(key, value, ""), "test")
    assert why in ledger.refused[0][1].why


def test_the_first_hook_to_set_it_wins(machine, monkeypatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with Ledger(machine) as ledger:
        assert ledger.apply(Action(f"env:{NAME}", "1", ""), "one")
        assert not ledger.apply(Action(f"env:{NAME}", "2", ""), "two")
        assert os.environ[NAME] == "1"
    assert ledger.refused[0][1].why == "the hook one has set it already"


def test_what_somebody_else_has_set_since_stays(machine, monkeypatch) -> None:
    monkeypatch.setenv(NAME, "before")
    with Ledger(machine) as ledger:
        ledger.apply(Action(f"env:{NAME}", "ours", ""), "test")
        os.environ[NAME] = "theirs"
    assert os.environ[NAME] == "theirs"
    assert ledger.left == [f"env:{NAME} is theirs now, which is not what test set"]


def test_a_fork_does_not_give_back(machine, monkeypatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with Ledger(machine) as ledger:
        ledger.apply(Action(f"env:{NAME}", "ours", ""), "test")
        ledger._process += 1  # as a fork sees it
        ledger.revert()
        assert os.environ[NAME] == "ours"
        ledger._process -= 1
    assert NAME not in os.environ


def test_a_hook_that_raises_takes_everything_back(machine, monkeypatch) -> None:
    monkeypatch.delenv(NAME, raising=False)

    class Sets(Settings):
        name = "sets"

        def plan(self, facts: Facts, wanted: Wanted) -> Plan:
            return Plan(self.name, [Action(f"env:{NAME}", "1", "")])

    class Raises(Settings):
        name, after = "raises", ("sets",)

        def plan(self, facts: Facts, wanted: Wanted) -> Plan:
            return Plan(self.name)

        def apply(self, plan: Plan, ledger: object) -> None:
            assert os.environ[NAME] == "1"
            raise RuntimeError("broken")

    assert isinstance(Sets(), Hook)
    run = plan_hooks(
        {"raises": {}, "sets": {}}, host=machine, given={"sets": Sets(), "raises": Raises()}
    )
    with pytest.raises(RuntimeError, match="broken"):
        run.apply()
    assert NAME not in os.environ


# A process that changes settings, and writes down at its very end what they are. It is ended from outside or by
# itself; a file outlives it, so that one is looked at from here.
CHILD = """
import atexit, json, os, signal, sys, time
from pathlib import Path
root, how, state = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

def note(*_):
    state.write_text(json.dumps([sorted(os.sched_getaffinity(0)), dict(os.environ)]))

signal.signal(signal.SIGINT, signal.default_int_handler)   # who starts the tests may ignore it
before = [sorted(os.sched_getaffinity(0)), dict(os.environ)]
if how == "SIGTERM-handled":
    def stop(number, frame):
        sys.exit(7)
    signal.signal(signal.SIGTERM, stop)
atexit.register(note)     # registered first, so run last
from sitsopt.runtime.hooks import Action, Host, Ledger
ledger = Ledger(Host(root, os.environ, None), ("process", "system"))
for key, value, scope in (("env:SITSOPT_TEST_SETTING", "1", "process"), ("affinity", [before[0][0]], "process"),
                          ("file:/proc/sys/kernel/numa_balancing", 0, "system")):
    ledger.apply(Action(key, value, "", scope), "test")
assert os.environ["SITSOPT_TEST_SETTING"] == "1" and (root / "proc/sys/kernel/numa_balancing").read_text() == "0\\n"
Path(str(state) + ".before").write_text(json.dumps(before))
print("ready", flush=True)
if how == "exception":
    raise ValueError("in the middle")
if how == "exit":
    sys.exit(3)
time.sleep(60)
"""
ENDS = [
    *[("exception", 1)] * 2, ("exit", 3), *[("SIGINT", -2)] * 3, *[("SIGTERM", -15)] * 3,
    ("SIGTERM-handled", 7), ("SIGHUP", -1),
]  # fmt: skip


def test_runs_that_are_ended_in_the_middle(tmp_path: Path) -> None:
    """Ten and one, at once: after each, affinity, environment and the machine's settings are as before."""
    runs = []
    for number, (how, code) in enumerate(ENDS):
        root, state = tmp_path / str(number), tmp_path / f"{number}.json"
        host(root, None, files={"/proc/sys/kernel/numa_balancing": "1"})
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), how, str(state)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        runs.append((child, root, state, how, code))
    for child, root, state, how, code in runs:
        assert child.stdout is not None and child.stdout.readline() == "ready\n", (
            child.communicate()
        )
        if how.startswith("SIG"):
            child.send_signal(getattr(signal, how.partition("-")[0]))
        _, err = child.communicate(timeout=60)
        assert child.returncode == code, (how, child.returncode, err)
        assert (root / "proc/sys/kernel/numa_balancing").read_text().strip() == "1", how
        before = json.loads(Path(f"{state}.before").read_text())
        if how not in (
            "SIGTERM",
            "SIGHUP",
        ):  # those end a process at once: nothing of it is left to look at
            assert json.loads(state.read_text()) == before, how


def test_the_reverting_itself_is_seen_before_a_deadly_signal(machine, monkeypatch) -> None:
    """What a SIGTERM without a handler does first, up to the moment of death."""
    monkeypatch.delenv(NAME, raising=False)
    killed = []
    monkeypatch.setattr(
        os, "kill", lambda pid, number: killed.append((pid, number, os.environ.get(NAME)))
    )
    before = signal.getsignal(signal.SIGTERM)
    ledger = Ledger(machine)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ledger.apply(Action(f"env:{NAME}", "1", ""), "test")
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        handler(signal.SIGTERM, None)
        assert killed == [(os.getpid(), signal.SIGTERM, None)]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
        ledger.revert()
