"""What lies behind the planned bytes: no more than is alive at once, nobody in another's place, given back in time."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import poochplan
from poochplan.formats.plan import Decision, Instructions, Plan
from poochplan.formats.profile_parts import HOST_ALIGNMENT_BYTES, host_aligned
from poochplan.runtime.devices.cpu import CpuDevice
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.devices.transfers import copy_in, copy_out
from poochplan.runtime.engine.host_tier import QUIET_STEPS, HostTier, Intervals
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays.tape import Tape
from poochplan.runtime.run_report import FallbackKind
from poochplan.runtime.session import Session
from tests.runtime.adversarial import AdversarialDevice, OpClock, PagedDevice, paged, pinned_bytes
from tests.runtime.detours import gradients_of
from tests.runtime.nets import Residual, Use, either_way, equal, gradients, of, our_warnings
from tests.runtime.random_plans import random_plan
from tests.runtime.served import follow

pytestmark = pytest.mark.usefixtures("one_thread")
PLANNED, LONGEST = 4, 9
LENGTHS = (6, 9, 5, 7)


def _images(count: int) -> torch.Tensor:
    return torch.randn(count, 8, 16, 16, generator=torch.Generator().manual_seed(count))


CASE = of(Residual, PLANNED, 8, 16, 16)
Trained = list[list[torch.Tensor]]


def _nobody() -> None:
    """Steps are not announced."""


@pytest.fixture(scope="module")
def swaps() -> Plan:
    return random_plan(CASE.profile(), 0, (0, 1, 0))


def _train(
    model: nn.Module, lengths: tuple[int, ...], announce: Callable[[], None] = _nobody, *, overlap: bool = False
) -> Trained:
    """``overlap``: each backward runs after the forward of the next step."""
    torch.manual_seed(1)
    seen: Trained = []
    waiting: list[torch.Tensor] = []
    for length in lengths:
        announce()
        waiting.append(model(_images(length)).square().mean())
        if len(waiting) > overlap:
            seen.append(gradients_of(model, waiting.pop(0)))
    return seen


def _host_bytes(session: Session) -> int:
    device = session._device
    if isinstance(device, CpuDevice):
        return os.fstat(device.file.descriptor).st_size
    if isinstance(device, PagedDevice):
        return sum(memory.size_bytes for memory in device.taken)
    return device.host_bytes


@contextmanager
def _session(plan: Plan, device: Callable[[], ComputeDevice] | None = None) -> Iterator[tuple[nn.Module, Session]]:
    model, _, _ = CASE.fresh()
    with poochplan.apply(plan, model, device=device) as session:
        yield model, session


def _longest_step_bytes(plan: Plan) -> int:
    with _session(plan) as (model, session):
        _train(model, (LONGEST,))
        return _host_bytes(session)


# -- bounded by what is alive -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("on_pages", [False, pytest.param(True, marks=pytest.mark.cpu_device)])
def test_steps_of_variable_length_take_the_host_bytes_of_those_that_are_alive_at_once_and_give_them_back(
    swaps: Plan, on_pages: bool, overlap: bool
) -> None:
    """Pages are the tier of the CUDA device, in ordinary memory; some values lie on several."""
    lengths = 3 * LENGTHS
    expected = _train(CASE.fresh()[0], lengths, overlap=overlap)
    longest = _longest_step_bytes(swaps)
    with paged() if on_pages else nullcontext() as device:
        with _session(swaps, (lambda: device) if on_pages else None) as (model, session):
            planned = session._engine.host.planned_bytes
            assert equal(expected, _train(model, lengths, session.step, overlap=overlap))
            assert not on_pages or device.taken[0].size_bytes == planned
            steps = 3 if overlap else 1  # two alive, and room for what does not fit together
            most = planned + steps * (longest - planned) + 10_000 * on_pages
            assert (longest if not on_pages else planned + 1) <= _host_bytes(session) <= most
            _train(model, (QUIET_STEPS + 2) * (PLANNED,), session.step)
            assert _host_bytes(session) == planned


def test_after_many_planned_steps_what_was_taken_behind_the_plan_is_given_back(swaps: Plan) -> None:
    longest = _longest_step_bytes(swaps)
    with _session(swaps) as (model, session):
        planned = session._engine.host.planned_bytes
        for _ in range(2):
            _train(model, (LONGEST, *QUIET_STEPS * (PLANNED,)))
            assert _host_bytes(session) == longest > planned
            _train(model, (PLANNED,))
            assert _host_bytes(session) == planned


def test_what_is_still_alive_outlasts_the_giving_back(swaps: Plan) -> None:
    def use(model: nn.Module, announce: Callable[[], None]) -> Trained:
        torch.manual_seed(1)
        announce()
        loss = model(_images(LONGEST)).square().mean()
        seen = _train(model, 2 * QUIET_STEPS * (PLANNED,), announce)
        return [*seen, gradients_of(model, loss)]

    expected = use(CASE.fresh()[0], lambda: None)
    with _session(swaps) as (model, session):
        assert equal(expected, use(model, session.step))


@pytest.mark.cpu_device
def test_where_the_limit_is_reached_values_are_kept_and_it_is_said_once(swaps: Plan) -> None:
    expected = _train(CASE.fresh()[0], LENGTHS)
    model, _, _ = CASE.fresh()
    with our_warnings() as told, paged(limit_bytes=50_000) as device:
        with poochplan.apply(swaps, model, device=lambda: device) as session:
            assert equal(expected, _train(model, LENGTHS))
            assert device.tier.behind_bytes <= 50_000
            assert session.report().last_step.out_bytes > 0
            assert session.report().total.fallback_kinds[FallbackKind.HOST_TIER] > 0
    (said,) = (text for text in told if "pinned memory" in text)
    assert "is limited to 48.8 KiB, needed" in said
    assert "free host memory, or raise host_limit_bytes of apply()" in said


@pytest.mark.cpu_device
def test_values_that_could_not_be_written_leave_their_places(swaps: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with _session(swaps) as (model, session):
        monkeypatch.setattr(os, "pwrite", full)
        loss = model(_images(LONGEST)).square().mean()
        largest = max(value.size_bytes for value in swaps.values) * LONGEST // PLANNED
        host = session._engine.host
        assert max(behind for _, behind in host.taken()) <= host_aligned(host.planned_bytes) + host_aligned(largest)
        del loss


# -- plans of several sizes ----------------------------------------------------------------------------------------


def host_bytes(plan: Plan) -> int:
    return HostTier([plan.instructions]).planned_bytes


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Three plans of one step: they swap the fewest bytes, more, and all."""
    profile = CASE.profile()
    found = sorted((random_plan(profile, seed, (3, 1, 0)) for seed in range(8)), key=host_bytes)
    chosen = [found[0], found[-1], random_plan(profile, 0, (0, 1, 0))]
    assert 0 < host_bytes(chosen[0]) < host_bytes(chosen[1]) < host_bytes(chosen[2])
    return chosen


def in_turn(order: Sequence[Plan]) -> Use:
    """Under each plan two steps, and a third that is left over: its backward runs under the next plan, and once more
    under the last one. The first plan's runs once, at the very end, when memory has been given back.
    """

    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        left: list[torch.Tensor] = []

        def forward() -> torch.Tensor:
            if session is not None:
                session.step()
            return step()

        def backward(loss: torch.Tensor, *, again: bool = False) -> None:
            loss.backward(retain_graph=again)  # type: ignore[no-untyped-call]
            seen.extend(gradients(model))
            model.zero_grad(set_to_none=True)

        for plan in order:
            if session is not None:
                follow(session, plan)
            for _ in range(2):
                backward(forward())
            if len(left) > 1:
                backward(left[-1], again=True)
            left.append(forward())
        while len(left) > 1:
            backward(left.pop())
        for _ in range(QUIET_STEPS + 1):
            backward(forward())
        backward(left.pop())
        return seen

    return use


ORDERS = {"larger": (0, 1, 2), "smaller": (2, 1, 0), "up_and_down": (0, 2, 1, 0, 2)}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("on_pages", [False, pytest.param(True, marks=pytest.mark.cpu_device)])
def test_plans_of_any_sizes_follow_each_other_while_earlier_steps_wait_for_their_backward(
    on_pages: bool, order: str, plans: list[Plan]
) -> None:
    chosen = [plans[index] for index in ORDERS[order]]
    with paged() if on_pages else nullcontext() as device:
        either_way(CASE, chosen[0], in_turn(chosen), device=(lambda: device) if on_pages else None)


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
def test_the_file_grows_beside_values_that_are_in_it_or_on_their_way(on_disk: Path, plans: list[Plan]) -> None:
    """A plan's room is written ahead when the first of two is in the file, and the second one on its way there."""
    device, tier = CpuDevice(on_disk, throttle_bytes_per_s=1e6), HostTier([])
    values = [_value(100_000, fill) for fill in (1, 2)]
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


# -- nobody in another's place ------------------------------------------------------------------------------------


def _value(size_bytes: int, fill: int = 0) -> SavedValue:
    tensor = torch.full((size_bytes,), fill, dtype=torch.uint8)
    return SavedValue.of(Decision.SWAP, Tape("cpu").record_of(tensor), tensor, None)


@pytest.mark.cpu_device
def test_a_place_is_free_once_its_value_is_gone_or_was_given_up_and_only_once() -> None:
    slab = HostTier([Instructions()])
    first, second = _value(5000), _value(5000)
    assert (slab.place(first), slab.place(second)) == (0, 8192)
    slab.free_place(0)
    third = _value(5000)
    assert slab.place(third) == 0
    del first  # its place is the third's now
    assert slab.place(_value(5000)) == 16384
    assert sorted(slab.taken()) == [(0, 5000), (8192, 13192)]
    del second
    assert slab.taken() == [(0, 5000)]
    assert slab.place(_value(100)) == 8192
    del third
    assert slab.taken() == []


@pytest.mark.cpu_device
def test_the_next_value_in_a_place_is_not_overwritten_by_copies_of_the_dead_one() -> None:
    """Nobody waits for the copies of the dead one, as where it dies on a thread that copies."""
    clock = OpClock()
    device, slab = AdversarialDevice(clock), HostTier([Instructions()])
    dead = _value(5000, fill=1)
    buffers = [dead.storage, device.allocate(5000)]  # a copy that was queued holds its storage until it ends
    place = slab.place(dead)
    copies = [copy_out(device, dead.storage, place), copy_in(device, buffers[1], place)]
    for copy in copies:
        copy.storage = None  # so that it goes without a wait
    del dead, copies, copy
    following = _value(5000, fill=2)
    assert slab.place(following) == place
    copy_out(device, following.storage, place).wait()
    back = device.allocate(5000)
    copy_in(device, back, place).wait()
    device.synchronize()
    assert torch.empty(0, dtype=torch.uint8).set_(back).unique().tolist() == [2]
    assert device.violations == []


@pytest.mark.cpu_device
@pytest.mark.usefixtures("copied_by_threads")
def test_a_value_that_the_garbage_collector_ends_on_the_copying_thread_leaves_its_place(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, collected, pwrite = threading.Event(), threading.Event(), os.pwrite

    def collecting(descriptor: int, data: bytes, at: int) -> int:
        assert go.wait(60)
        if not collected.is_set():
            gc.collect()
            collected.set()
        return pwrite(descriptor, data, at)

    device, slab = CpuDevice(on_disk), HostTier([Instructions()])
    monkeypatch.setattr(os, "pwrite", collecting)
    values = [_value(5000, fill=fill) for fill in (1, 2)]
    for value in values:
        value.host_offset = slab.place(value)
        value.out_copy = copy_out(device, value.storage, value.host_offset)
    first, second = values
    cycle: list[object] = [second]
    cycle.append(cycle)
    gone = weakref.ref(second)
    del cycle, second, values, value
    go.set()
    assert collected.wait(60)
    following = _value(5000, fill=3)
    assert gone() is None
    assert slab.place(following) == 8192
    copy_out(device, following.storage, 8192).wait()
    back = device.allocate(5000)
    copy_in(device, back, 8192).wait()
    device.close()
    assert torch.empty(0, dtype=torch.uint8).set_(back).unique().tolist() == [3]
    assert first.host_offset == 0


SIZES = st.integers(0, 5 * HOST_ALIGNMENT_BYTES)
STEPS = st.lists(
    st.one_of(SIZES.map(lambda size: ("take", size)), st.integers(0, 40).map(lambda at: ("give back", at)))
)


@pytest.mark.cpu_device
@settings(deadline=None)
@given(steps=STEPS)
def test_it_takes_the_lowest_place_that_is_free_and_large_enough_and_looks_only_at_what_lies_between_others(
    steps: list[tuple[str, int]],
) -> None:
    """Holes that touch are one."""
    intervals, taken = Intervals(), list[tuple[int, int, int]]()
    for what, number in steps:
        if what == "take":
            room = max(host_aligned(number), HOST_ALIGNMENT_BYTES)
            behind_others = sorted({0, *(behind for _, behind, _ in taken)})
            lowest = next(
                at for at in behind_others if not any(at < end and first < at + room for first, end, _ in taken)
            )
            assert intervals.take(number) == lowest
            taken.append((lowest, lowest + room, number))
        elif taken:
            first, _, size_bytes = taken.pop(number % len(taken))
            intervals.give_back(first, size_bytes)
        ends = [0, *(at for first, behind, _ in sorted(taken) for at in (first, behind)), intervals._holes[-1][1]]
        between = zip(ends[::2], ends[1::2], strict=True)
        assert intervals._holes == [(first, behind) for first, behind in between if first < behind]
