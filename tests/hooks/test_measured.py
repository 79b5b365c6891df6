"""Predicted beside measured, in a process group of threads over gloo."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from sitsopt.runtime.hooks import nvlink as hook
from sitsopt.runtime.hooks import plan_hooks
from tests.hooks.fakes import cards, host


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_every_process_measures_the_same_sizes() -> None:
    store, found = dist.HashStore(), {}

    def member(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
        found[rank] = hook.measure(group, (1024, 1 << 18), rounds=2)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(each) for each in found.values()] == [{1024, 1 << 18}] * 2
    assert all(us > 0 for each in found.values() for us in each.values())


def test_after_initialisation_nothing_is_set(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        hook,
        "_initialised",
        lambda: "a process group is initialised already, and NCCL reads it before that",
    )
    plan = plan_hooks({"nvlink": {}}, host=host(tmp_path, cards(2, {(0, 1): 4}))).plans["nvlink"]
    assert not plan.actions
    assert {r.what.partition("=")[0] for r in plan.refused} >= {
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_P2P_LEVEL",
    }
