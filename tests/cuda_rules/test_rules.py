"""The stand-in keeps those of CUDA's rules whose lack no mutant of the device would show (``test_cuda_mutants``)."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.cuda_rules.machine import WHERE, Machine, on_stand_in

COUNT = 256


@pytest.fixture
def side(gpu: Machine) -> torch.cuda.Stream:
    return torch.cuda.Stream(WHERE)


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


def test_afterwards_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one of its own")
    with on_stand_in():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()
    assert torch.ones(1).device.type == "cpu"
