"""Plans of several sizes in one session: each finds its room on the host, and nobody who is left over loses a byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile_parts import host_aligned
from poochplan.runtime.devices.cpu import CpuDevice
from poochplan.runtime.devices.transfers import copy_in, copy_out
from poochplan.runtime.engine.host_tier import HostTier
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays.tape import Tape
from tests.runtime.nets import CASES, equal
from tests.runtime.paged import paged, pinned_bytes
from tests.runtime.switching import follow, growing_plans, host_bytes, in_core, trained

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = CASES["residual"]
ORDERS = {"larger": (0, 1, 2), "smaller": (2, 1, 0), "up_and_down": (0, 2, 1, 0, 2)}


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return growing_plans(CASE)


@pytest.mark.parametrize("order", ORDERS)
def test_plans_of_any_sizes_follow_each_other_while_earlier_steps_wait_for_their_backward(
    order: str, plans: list[Plan]
) -> None:
    chosen = [plans[index] for index in ORDERS[order]]
    assert equal(in_core(CASE, chosen), trained(CASE, chosen))


@pytest.mark.cpu_device
@pytest.mark.parametrize("order", ORDERS)
def test_they_do_on_pinned_slabs_and_pages(order: str, plans: list[Plan]) -> None:
    chosen = [plans[index] for index in ORDERS[order]]
    with paged() as device:
        assert equal(in_core(CASE, chosen), trained(CASE, chosen, lambda: device))


def turn(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> None:
    step().backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


@pytest.mark.cpu_device
def test_a_larger_plan_takes_over_what_is_pinned_and_no_more_than_its_bytes_are(plans: list[Plan]) -> None:
    model, step, _ = CASE.fresh()
    with paged() as device, poochplan.apply(plans[0], model, device=lambda: device) as session:
        turn(model, step)
        for plan in plans[1:]:
            before = list(device.taken)
            follow(session, plan)
            turn(model, step)
            assert device.taken[: len(before)] == before
            assert pinned_bytes(device.tier) == host_bytes(plan)


@pytest.mark.cpu_device
def test_a_slab_that_nobody_is_on_any_more_is_given_back(plans: list[Plan]) -> None:
    model, step, _ = CASE.fresh()
    with paged() as device, poochplan.apply(plans[0], model, device=lambda: device) as session:
        left = step()
        follow(session, plans[2])
        session.step()
        turn(model, step)
        both = host_aligned(host_bytes(plans[0])) + host_bytes(plans[2])
        assert host_bytes(plans[2]) < pinned_bytes(device.tier) <= both
        left.backward()
        model.zero_grad(set_to_none=True)
        del left
        for _ in range(12):
            session.step()
            turn(model, step)
        assert pinned_bytes(device.tier) == host_bytes(plans[2])


@pytest.mark.cpu_device
def test_the_file_grows_beside_values_that_are_in_it_or_on_their_way(tmp_path: Path, plans: list[Plan]) -> None:
    """A plan's room is written ahead when the first of two is in the file, and the second one on its way there."""
    device, tier = CpuDevice(tmp_path, throttle_bytes_per_s=1e6), HostTier([])
    values = [_value(fill) for fill in (1, 2)]
    for value in values:
        value.host_offset = tier.place(value)
        value.out_copy = copy_out(device, value.storage, value.host_offset)
        if value is values[0]:
            value.out_copy.wait()
    room = tier.grow([plans[2].instructions])
    device.reserve_host(room[1] - room[0], room[0])
    for fill, value in enumerate(values, 1):
        value.out_copy.wait()
        device.trim_host(tier.taken())
        back = torch.zeros(100_000, dtype=torch.uint8)
        copy_in(device, back.untyped_storage(), value.host_offset).wait()
        assert back.unique().tolist() == [fill]
    device.close()


def _value(fill: int) -> SavedValue:
    tensor = torch.full((100_000,), fill, dtype=torch.uint8)
    return SavedValue.of(Decision.SWAP, Tape("cpu").record_of(tensor), tensor, None)
