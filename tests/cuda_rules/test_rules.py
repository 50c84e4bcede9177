"""The stand-in keeps CUDA's rules: what breaks one shows, as bytes or as an access that nothing orders."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.cuda_rules.machine import WHERE, Machine, on_stand_in

COUNT = 256


@pytest.fixture
def gpu() -> Iterator[Machine]:
    with on_stand_in() as machine:
        yield machine


@pytest.fixture
def side(gpu: Machine) -> torch.cuda.Stream:
    return torch.cuda.Stream(WHERE)


def test_tensors_say_that_they_are_on_the_gpu_and_so_do_their_results_and_gradients(gpu: Machine) -> None:
    layer = torch.nn.Linear(3, 2).to("cuda")
    result = layer(torch.randn(4, 3).cuda())
    result.sum().backward()
    assert layer.weight.grad is not None
    assert {t.device for t in (layer.weight, result, result[1:], layer.weight.grad)} == {WHERE}
    assert not result.cpu().is_cuda
    assert torch.ones(1).device.type == "cpu"


def test_tensors_of_two_devices_do_not_mix(gpu: Machine) -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).sum().item() == 6


def test_the_gpu_has_a_generator_of_its_own(gpu: Machine) -> None:
    torch.manual_seed(5)
    first = torch.rand(4, device="cuda").tolist()
    on_host = torch.get_rng_state()
    torch.rand(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), on_host)
    torch.cuda.default_generators[0].manual_seed(5)
    assert torch.rand(4, device="cuda").tolist() == first


def test_a_new_buffer_holds_no_numbers(gpu: Machine) -> None:
    assert torch.empty(COUNT, device="cuda").isnan().all()


def test_a_freed_block_is_handed_out_at_once_on_its_own_stream_and_on_no_other(
    gpu: Machine, side: torch.cuda.Stream
) -> None:
    first = torch.ones(COUNT, device="cuda")
    address = first.data_ptr()
    del first
    with torch.cuda.stream(side):
        other = torch.ones(COUNT, device="cuda")
    assert other.data_ptr() != address
    assert torch.ones(COUNT, device="cuda").data_ptr() == address


def test_a_recorded_stream_keeps_a_freed_block_until_it_has_got_there(gpu: Machine, side: torch.cuda.Stream) -> None:
    first = torch.ones(COUNT, device="cuda")
    address = first.data_ptr()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1000)
    first.record_stream(side)
    del first
    second = torch.ones(COUNT, device="cuda")
    assert second.data_ptr() != address
    side.synchronize()
    assert torch.ones(COUNT, device="cuda").data_ptr() == address


def test_a_freed_block_counts_as_requested_until_a_recorded_stream_has_got_there(
    gpu: Machine, side: torch.cuda.Stream
) -> None:
    first = torch.ones(COUNT, device="cuda")
    with torch.cuda.stream(side):
        torch.cuda._sleep(1000)
    first.record_stream(side)
    del first
    assert gpu.memory.now["allocated_bytes"] == 0
    assert gpu.memory.now["requested_bytes"] == 4 * COUNT
    side.synchronize()
    torch.ones(COUNT, device="cuda")  # for which blocks are looked through
    assert gpu.memory.now["requested_bytes"] == 0


def test_a_pinned_copy_runs_when_an_op_behind_a_wait_needs_it_and_not_before(
    gpu: Machine, side: torch.cuda.Stream
) -> None:
    pinned = torch.empty(COUNT, pin_memory=True).fill_(7)
    there = torch.zeros(COUNT, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(pinned, non_blocking=True)
    done = side.record_event()
    assert not done.query()
    torch.cuda.current_stream().wait_event(done)
    assert (there == 7).all()
    assert gpu.violations == []


def test_a_missing_wait_is_told_and_the_bytes_are_not_there(gpu: Machine, side: torch.cuda.Stream) -> None:
    pinned = torch.empty(COUNT, pin_memory=True).fill_(7)
    there = torch.zeros(COUNT, device="cuda")
    with torch.cuda.stream(side):
        there.copy_(pinned, non_blocking=True)
    assert (there == 0).all()
    assert any("a copy in on stream 1 may run before or beside" in one for one in gpu.violations)


def test_a_block_let_go_under_a_copy_is_told_and_the_copy_reads_the_next_tenant(
    gpu: Machine, side: torch.cuda.Stream
) -> None:
    pinned = torch.empty(COUNT, pin_memory=True)
    there = torch.full((COUNT,), 3.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pinned.copy_(there, non_blocking=True)
    del there
    torch.full((COUNT,), 4.0, device="cuda")
    side.synchronize()
    assert (pinned == 4).all()
    assert any("were let go beside a copy out" in one for one in gpu.violations)


def test_a_pageable_copy_holds_the_host_and_is_counted(gpu: Machine, side: torch.cuda.Stream) -> None:
    with torch.cuda.stream(side):
        torch.cuda._sleep(1000)
        there = torch.ones(COUNT, device="cuda")
        begun = side.record_event()
        there.to("cpu", non_blocking=True)
    assert begun.query()
    before = gpu.blocking_copies
    there.copy_(torch.zeros(COUNT), non_blocking=True)
    assert gpu.blocking_copies == before + 1


def test_a_stream_is_current_on_one_thread(gpu: Machine, side: torch.cuda.Stream) -> None:
    seen: list[bool] = []
    with torch.cuda.stream(side):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream() == side))
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() == side
    assert seen == [False]


def test_backward_runs_on_another_thread_on_the_streams_of_forward(gpu: Machine, side: torch.cuda.Stream) -> None:
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            seen.append((threading.current_thread().name, torch.cuda.current_stream() == side))
            return gradient * 2

    tensor = torch.ones(COUNT, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there = Twice.apply(tensor)
    torch.cuda.current_stream().wait_stream(side)
    Twice.apply(there).sum().backward()
    assert seen == [("stand-in autograd", False), ("stand-in autograd", True)]
    assert tensor.grad is not None
    assert (tensor.grad == 4).all()
    assert gpu.violations == []


def test_two_streams_without_a_wait_are_told(gpu: Machine, side: torch.cuda.Stream) -> None:
    tensor = torch.ones(COUNT, device="cuda")
    with torch.cuda.stream(side):
        tensor.add_(1)
    assert any("aten.add_.Tensor on stream 1 may run before or beside" in one for one in gpu.violations)


def test_events_tell_simulated_time(gpu: Machine) -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(2_000_000)
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(1, rel=0.01)


def test_afterwards_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one of its own")
    with on_stand_in():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()
    assert torch.ones(1).device.type == "cpu"
