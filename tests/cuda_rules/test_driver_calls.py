"""How often a swapped value asks something of the driver: each call holds the launching thread for microseconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import torch

from poochplan.formats.plan import Plan
from poochplan.runtime.devices.accelerator import QueuedEvent
from poochplan.runtime.devices.cuda import CudaDevice
from tests.cuda_rules.machine import WHERE, Machine
from tests.gpu.cases import CASES
from tests.runtime.nets import train
from tests.runtime.random_plans import random_plan

CASE = CASES["residual"]


@pytest.mark.parametrize("is_used_again", [True, False], ids=["now", "before the pool"])
def test_a_swapped_value_takes_four_recordings_four_waits_and_two_copies_and_makes_no_event(
    gpu: Machine, is_used_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_used_again:
        monkeypatch.delattr(QueuedEvent, "__del__")
    plan = random_plan(CASE.profile(), 0, (0, 1, 0))
    swapped = sum(value.host_offset >= 0 for value in plan.values)
    assert swapped > 10
    (first, _, last), _ = _calls_of_steps(gpu, plan, on_audit="off")
    calls = {"recorded": 4 * swapped, "waits": 4 * swapped, "copies": 2 * swapped}
    assert last == (calls if is_used_again else calls | {"events": 4 * swapped})
    assert (first["events"] < 2 * swapped) is is_used_again  # as many as are held at once


def test_the_audit_adds_a_copy_and_an_event_for_each_value_that_it_compares(gpu: Machine) -> None:
    plan = random_plan(CASE.profile(), 0, (0, 1, 0))
    (*_, audited), report = _calls_of_steps(gpu, plan)
    (*_, without), _ = _calls_of_steps(gpu, plan, on_audit="off")
    compared = report.last_step.audited_values
    assert compared > 0
    assert audited - without == dict.fromkeys(("recorded", "copies", "events"), compared)


def _calls_of_steps(gpu: Machine, plan: Plan, **options: Any) -> tuple[list[Counter[str]], Any]:
    """What each of three steps asks of the driver; and the report."""
    counts: dict[str, list[Counter[str]]] = defaultdict(list)
    _, report = train(CASE, 3, plan, lambda place: counts[place].append(Counter(gpu.counts)), meter="never", **options)
    return [behind - before for before, behind in zip(counts["step"], counts["backward"], strict=True)], report


def test_an_event_is_used_again_only_when_nobody_can_ask_for_it(gpu: Machine) -> None:
    device = CudaDevice(WHERE)
    torch.cuda._sleep(1000)
    held = device.compute.record()
    addresses = {id(held.event)}
    for _ in range(3):
        other = device.inward.record()
        assert id(other.event) not in addresses
        device.compute.wait(other)
    made = gpu.counts["events"]
    del other, held
    device.compute.record()
    assert gpu.counts["events"] == made
    device.close()
