"""CUDA_VISIBLE_DEVICES in all its spellings (R04)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sitsopt.runtime.hooks import gather, plan_hooks
from sitsopt.runtime.hooks.devices import MaskError, visible
from tests.hooks.fakes import Card, cards, host

SLICES = ("MIG-11111111-aaaa-0000-0000-000000000000", "MIG-22222222-bbbb-0000-0000-000000000000")


def three() -> list[Card]:
    made = cards(3)
    made[1].mig, made[1].slices = True, SLICES
    return made


UUID = [card.uuid for card in three()]


def seen(root: Path, mask: str | None, order: str = "PCI_BUS_ID") -> list[str]:
    env = {"CUDA_DEVICE_ORDER": order} | ({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    return [device.label for device in visible(gather(host(root, three(), env=env))).devices]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [UUID[0], SLICES[0], UUID[2]]),
        ("", []),
        ("0", [UUID[0]]),
        ("2,0", [UUID[2], UUID[0]]),
        (" 2 , 0 ", [UUID[2], UUID[0]]),
        ("2,9,0", [UUID[2]]),
        ("-1,0", []),
        (UUID[2], [UUID[2]]),
        (UUID[2].lower(), [UUID[2]]),
        (UUID[2].upper(), [UUID[2]]),
        (UUID[0][:8], [UUID[0]]),
        (f"{UUID[2]},{UUID[0]}", [UUID[2], UUID[0]]),
        (SLICES[1], [SLICES[1]]),
        (SLICES[1].lower()[:12], [SLICES[1]]),
        (f"MIG-{UUID[1]}/1/0", [f"MIG-{UUID[1]}/1/0"]),
        (f"mig-{UUID[1].lower()}/1/0", [f"mig-{UUID[1].lower()}/1/0"]),
        ("1", [SLICES[0]]),
    ],
)
def test_spellings(mask: str | None, expected: list[str], tmp_path: Path) -> None:
    assert seen(tmp_path, mask) == expected


@pytest.mark.parametrize(
    "mask", ["GPU-ffffffff", "MIG-ffffffff", "GPU-", "first", f"MIG-{UUID[1][:-4]}zz/1/0"]
)
def test_what_is_not_there_is_told_clearly(mask: str, tmp_path: Path) -> None:
    with pytest.raises(MaskError, match="CUDA_VISIBLE_DEVICES: `") as error:
        seen(tmp_path, mask)
    assert UUID[0].lower() in str(error.value)
    run = plan_hooks(
        {"nvlink": {}, "hbm": {}}, host=host(tmp_path, three(), env={"CUDA_VISIBLE_DEVICES": mask})
    )
    assert not run.failed
    assert all(mask in refused.why for _, refused in run.refused() if "page" not in refused.what)


def test_unlike_gpus_are_numbered_by_speed(tmp_path: Path) -> None:
    made = cards(2)
    made[0].name = "NVIDIA T4"
    found = visible(gather(host(tmp_path, made)))
    assert "by speed" in found.problem
    assert not visible(
        gather(host(tmp_path, made, env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))
    ).problem
    assert not visible(
        gather(host(tmp_path, made, env={"CUDA_VISIBLE_DEVICES": made[1].uuid}))
    ).problem
