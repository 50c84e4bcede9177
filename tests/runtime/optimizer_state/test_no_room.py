"""Where the host tier has no room for state, or its copies fail, that state stays, with one line and the right bits."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import poochplan
from poochplan.runtime.devices.cpu import CpuDevice
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.optimizer_state.places import NO_LONGER_SHARED, NO_ROOM, STAYS_AWAY
from tests.runtime.adversarial import AdversarialDevice, OpClock
from tests.runtime.nets import our_warnings
from tests.runtime.optimizer_state.trainings import Training, away, chunks, planned

pytestmark = pytest.mark.cpu_device
STREAMED = 10
"""Moments of the five large weights."""


def trained(
    open_device: Callable[[], ComputeDevice] | None = None, steps: int = 4
) -> tuple[Training, list[int], list[str]]:
    """The bits of a training, in which the number of tensors that were away was noted behind each step."""
    plan = planned(state=chunks(12, 2, kept=())) if open_device is not None else None
    training, counts = Training(), list[int]()
    with our_warnings() as said:
        session: Any = contextlib.nullcontext()
        if plan is not None:
            session = poochplan.apply(plan, training.model, training.optimizer, device=open_device, quiet=True)
        with session as training.session:
            torch.manual_seed(7)
            for _ in range(steps):
                training.step()
                counts.append(len(training.away()))
        training.session = None
        training.steps(1)
    return training, counts, said


@pytest.fixture(scope="module")
def plain() -> list[bytes]:
    return trained()[0].seen


def refusing(first: int, behind: int) -> type[CpuDevice]:
    """A device of which those calls find no room, counted from 0."""
    calls = list[int]()

    class Refusing(CpuDevice):
        def reserve_host(self, size_bytes: int, first_byte: int = 0, *, lasting: bool = False) -> None:
            if lasting:
                calls.append(size_bytes)
                if first < len(calls) <= behind:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().reserve_host(size_bytes, first_byte, lasting=lasting)

    return Refusing


@pytest.mark.parametrize(("first", "behind", "left"), [(0, 99, 0), (3, 5, STREAMED - 2), (9, 10, STREAMED - 1)])
def test_a_full_disk(plain: list[bytes], first: int, behind: int, left: int) -> None:
    training, counts, said = trained(refusing(first, behind))
    assert training.seen == plain
    assert counts == [left] * 4
    assert [NO_ROOM.partition("(")[0] in line for line in said] == [True]


def test_a_mapping_that_is_refused(plain: list[bytes]) -> None:
    class Unmapped(CpuDevice):
        def host_view(self, size_bytes: int, first: int) -> torch.Tensor:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    held = list[Any]()

    class Watched(Unmapped):
        def close(self) -> None:
            held.append(self.file.size_bytes)
            super().close()

    training, counts, said = trained(Watched)
    assert training.seen == plain
    assert counts == [0] * 4
    assert len(said) == 1
    assert held[0] <= 1 << 20  # each failed place was given back, and the next one has tried it


@contextlib.contextmanager
def failing(*, writes: int = 0, reads: int = 0) -> Iterator[Callable[[], AdversarialDevice]]:
    clock = OpClock()
    device = AdversarialDevice(clock, failing_writes=writes, failing_reads=reads)
    with clock:
        yield lambda: device
    assert device.violations == []


@pytest.mark.parametrize("count", [1, 3, 10])
def test_copies_out_that_fail(plain: list[bytes], count: int) -> None:
    with failing(writes=count) as opened:
        training, counts, said = trained(opened)
    assert training.seen == plain
    assert counts == [STREAMED - count] * 4
    assert len(said) == 1


@pytest.mark.parametrize("count", [1, 3, 25])
def test_copies_in_that_fail_are_made_up_for(plain: list[bytes], count: int) -> None:
    with failing(reads=count) as opened:
        training, counts, _ = trained(opened)
    assert training.seen == plain
    assert counts == [STREAMED] * 4


def test_a_device_without_room_when_the_session_ends(plain: list[bytes]) -> None:
    class Small(CpuDevice):
        is_full = False

        def allocate(self, size_bytes: int) -> torch.UntypedStorage:
            if self.is_full:
                raise torch.OutOfMemoryError("no room")
            return super().allocate(size_bytes)

    training = Training()
    plan = planned(state=chunks(12, 2, kept=()))
    opened = list[Small]()

    def open_device() -> ComputeDevice:
        opened.append(Small())
        return opened[0]

    torch.manual_seed(7)
    with (
        our_warnings() as said,
        poochplan.apply(plan, training.model, training.optimizer, device=open_device, quiet=True),
    ):
        training.steps(4)
        opened[0].is_full = True
    assert [STAYS_AWAY.partition("{")[0] in line for line in said] == [True]
    training.steps(1)
    assert training.seen == plain


def test_a_step_that_finds_no_room_on_the_device_ends_in_its_error_and_the_next_one_goes_on(plain: list[bytes]) -> None:
    class Full(CpuDevice):
        calls = 0

        def allocate(self, size_bytes: int) -> torch.UntypedStorage:
            Full.calls += 1
            if Full.calls == 3:
                raise torch.OutOfMemoryError("no room")
            return super().allocate(size_bytes)

    training = Training()
    plan = planned(state=chunks(12, 2, kept=()))
    torch.manual_seed(7)
    with poochplan.apply(plan, training.model, training.optimizer, device=Full, quiet=True) as session:
        training.step()
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        with pytest.raises(torch.OutOfMemoryError):
            training.optimizer.step()
        training.optimizer.step()
        training.see(loss)
        training.steps(2)
        assert len(away(session, training.optimizer)) == STREAMED
    training.steps(1)
    assert training.seen == plain


def test_every_line_says_what_to_do() -> None:
    for line in (NO_ROOM, STAYS_AWAY, NO_LONGER_SHARED):
        assert ";" in line
