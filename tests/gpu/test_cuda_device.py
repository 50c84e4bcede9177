"""Pinned memory at its exact size, copies beside compute, and buffers that nobody takes too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poochplan.profiler import link as links
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.pinned import PAGE_BYTES, PinnedMemory, cupy_or_none
from poochplan.runtime.devices.transfers import Copy, copy_in, copy_out
from tests.gpu.cases import ABOUT_CUDA, CASES, WHERE
from tests.runtime.nets import equal, train
from tests.runtime.random_plans import random_plan

pytestmark = ABOUT_CUDA
MIB = 1 << 20
A_WHILE_CYCLES = 400_000_000  # some 0.2 s


@pytest.fixture(params=[False, True], ids=["registered", "cupy"])
def cupy(request: pytest.FixtureRequest) -> Any:
    if request.param and cupy_or_none() is None:
        pytest.skip("CuPy is not installed, or finds no CUDA runtime")
    return cupy_or_none() if request.param else None


@pytest.fixture
def device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("poochplan.runtime.devices.cuda.cupy_or_none", lambda: cupy)
    opened = CudaDevice(WHERE)
    yield opened
    opened.close()


def _tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def test_pinned_memory_has_the_size_asked_for_and_is_given_back(cupy: Any) -> None:
    size_bytes = 96 * MIB + 4096  # torch's own allocator would take 128 MiB
    torch.cuda.synchronize()
    taken = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    memory = PinnedMemory(size_bytes, cupy)
    assert memory.tensor.nbytes == memory.size_bytes == size_bytes
    assert memory.tensor.is_pinned()
    assert memory.tensor[-4096:].is_pinned()
    assert memory.pointer % 4096 == 0 or cupy is not None
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == taken
    probe = memory.tensor if cupy is None else None
    memory.free()
    memory.free()
    if probe is not None:
        assert not probe.is_pinned()
    else:
        assert cupy.cuda.runtime.pointerGetAttributes(memory.pointer).type == 0  # known to nobody


def test_more_than_there_is_raises_an_os_error(cupy: Any) -> None:
    with pytest.raises(OSError, match="could not be pinned"):
        PinnedMemory(1 << 60, cupy)  # more addresses than any machine has: nothing is taken, however it overcommits


def test_bytes_come_back_as_they_went(device: CudaDevice) -> None:
    device.reserve_host(8 * MIB)
    behind = ((64 * MIB, 1000), (70 * MIB, 5 * MIB + 3))  # on a page; on two
    for offset, size_bytes in ((0, 1), (4096, 3 * MIB + 7), (4 * MIB, 4 * MIB), *behind):
        content = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=WHERE)
        copy_out(device, content.untyped_storage(), offset).wait()
        back = device.allocate(size_bytes)
        copy_in(device, back, offset).wait()
        assert torch.equal(_tensor(back), content)


def test_pages_are_pinned_up_to_the_limit_used_again_and_given_back() -> None:
    device = CudaDevice(WHERE, host_limit_bytes=2 * PAGE_BYTES)
    device.reserve_host(MIB)
    storage = device.allocate(2 * PAGE_BYTES)
    for _ in range(3):
        copy = copy_out(device, storage, MIB)
        copy.wait()
        assert copy.error is None
        assert device._host.behind_bytes == 2 * PAGE_BYTES
    refused = copy_out(device, storage, 2 * MIB)
    refused.wait()
    assert "is limited to 128 MiB, needed 192 MiB" in str(refused.error)
    device.trim_host([(0, MIB + 1)])
    assert device._host.behind_bytes == PAGE_BYTES
    device.trim_host([(0, MIB)])
    assert device._host.behind_bytes == 0
    device.close()


def test_a_copy_out_waits_for_compute_and_the_host_waits_for_neither(device: CudaDevice) -> None:
    device.reserve_host(64 * MIB)
    storage = device.allocate(64 * MIB)
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE_CYCLES)
    copy = copy_out(device, storage, 0)
    copy.wait()  # of the compute stream, not of this thread
    assert not copy.done()
    torch.cuda.synchronize()
    assert copy.done()


@pytest.mark.needs("numerics", "a sum is read")
def test_compute_goes_on_beside_a_copy_that_nobody_waits_for(device: CudaDevice) -> None:
    device.reserve_host(64 * MIB)
    storage = device.allocate(64 * MIB)
    torch.ones(1000, device=WHERE).sum()  # a kernel that is launched first is loaded first, behind all that is queued
    torch.cuda.synchronize()
    with torch.cuda.stream(device.outward.stream):
        torch.cuda._sleep(A_WHILE_CYCLES)
    copy = copy_out(device, storage, 0)
    computed = torch.ones(1000, device=WHERE).sum()
    device.compute.stream.synchronize()
    assert computed.item() == 1000
    assert not copy.done()
    copy.wait()
    torch.cuda.synchronize()


SIZE_BYTES, COUNT = 2 * MIB, 50


def _late_copy_out(device: CudaDevice, number: int, offset: int) -> Copy:
    """Of a new storage, full of that number, which it alone holds."""
    storage = device.allocate(SIZE_BYTES)
    _tensor(storage).fill_(number)
    with torch.cuda.stream(device.outward.stream):
        torch.cuda._sleep(A_WHILE_CYCLES // 100)
    return copy_out(device, storage, offset)


def _full(number: int) -> torch.Tensor:
    return torch.full((SIZE_BYTES,), number, dtype=torch.uint8, device=WHERE)


def _assert_back(device: CudaDevice, number: int, offset: int) -> None:
    back = device.allocate(SIZE_BYTES)
    copy_in(device, back, offset).wait()
    assert bool((_tensor(back) == number).all()), number


@pytest.mark.parametrize("way", ["waited for", "waited for on another stream", "dropped"])
def test_the_buffer_of_an_unfinished_copy_out_is_not_taken(device: CudaDevice, way: str) -> None:
    device.reserve_host(SIZE_BYTES * COUNT)
    side = torch.cuda.Stream(WHERE) if way == "waited for on another stream" else None
    for number in range(COUNT):
        copy = _late_copy_out(device, number, number * SIZE_BYTES)
        if way != "dropped":
            with torch.cuda.stream(side):
                copy.wait()
        del copy
        for _ in range(3):  # whoever gets the block writes into it
            _full(255)
    for number in range(COUNT):
        _assert_back(device, number, number * SIZE_BYTES)


def test_the_buffer_of_an_unfinished_copy_in_is_not_taken(device: CudaDevice) -> None:
    device.reserve_host(SIZE_BYTES)
    copy_out(device, _full(0).untyped_storage(), 0).wait()
    for number in range(1, COUNT):
        with torch.cuda.stream(device.inward.stream):
            torch.cuda._sleep(A_WHILE_CYCLES // 100)
        copy_in(device, device.allocate(SIZE_BYTES), 0)  # dropped at once
        other = _full(number)
        device.inward.stream.synchronize()
        assert bool((other == number).all()), number


def test_a_session_within_its_cap_trains_exactly() -> None:
    case = CASES["residual"]
    profile = case.profile()
    plan = random_plan(profile, 0, (0, 1, 0))
    reference, _ = train(case, 2)
    planned, _ = train(case, 2, plan, cap_bytes=profile.in_core_peak_bytes + 512 * MIB)
    assert equal(reference, planned)


def test_without_cupy_a_plan_trains_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poochplan.runtime.devices.cuda.cupy_or_none", lambda: None)
    case = CASES["residual"]
    plan = random_plan(case.profile(), 0, (0, 1, 0))
    assert equal(train(case, 2)[0], train(case, 2, plan)[0])


def test_an_ops_workspace_is_in_the_profile() -> None:
    from poochplan.formats.profile import Phase
    from poochplan.profiler.capture.captured import CapturedOp
    from poochplan.profiler.capture.workspace import AllocatorWorkspace

    meter, op = AllocatorWorkspace(WHERE), CapturedOp("op", "", Phase.FORWARD)
    meter.begin()
    held = torch.empty(4 * MIB, dtype=torch.uint8, device=WHERE)
    del held
    kept = torch.empty(MIB, dtype=torch.uint8, device=WHERE)
    meter.end(op)
    assert 2 * MIB <= op.workspace_bytes <= 4 * MIB
    del kept


def test_events_tell_the_time_of_the_device_not_of_queueing() -> None:
    from poochplan.profiler.capture.clock import DeviceClock

    clock = DeviceClock(WHERE)
    marks = []
    for _ in range(20):
        begin = clock.begin()
        torch.cuda._sleep(2_000_000)
        marks.append((begin, clock.end()))
    clock.synchronize()
    seconds = sorted(clock.seconds(begin, end) for begin, end in marks)
    assert 0.5e-3 < seconds[10] < 5e-3


def test_pageable_copies_are_measured_beside_pinned_ones() -> None:
    largest = links.LARGEST_PAGEABLE_BYTES
    sizes = (largest // 64, largest, 2 * largest)
    link = links.measure_link(WHERE, None, None, sizes)
    for pinned, pageable in ((link.outward, link.pageable_out), (link.inward, link.pageable_in)):
        assert [size for size, _ in pinned.curve] == list(sizes)
        assert pageable is not None
        assert [size for size, _ in pageable.curve] == list(sizes[:-1])
        assert all(seconds > 0 for _, seconds in pageable.curve)
        assert pageable.bandwidth_bytes_per_s > 0
