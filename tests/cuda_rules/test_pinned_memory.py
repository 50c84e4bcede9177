"""Pinned memory: near the GPU, in no child of a fork, refused before it is touched; and where the driver refuses it."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poochplan.runtime.devices import pinned
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.pinned import PinnedMemory, cupy_or_none, memcpy_async, processors_near
from poochplan.runtime.devices.transfers import copy_in, copy_out
from tests.cuda_rules.machine import WHERE, Machine, on_stand_in
from tests.gpu.cases import CASES
from tests.runtime.arena.steps import is_mapped
from tests.runtime.nets import equal, followed, train
from tests.runtime.random_plans import random_plan

MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[Machine]:
    with on_stand_in(cupy=False) as machine:
        yield machine
        assert machine.violations == []


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a machine whose second node has the processors 0 and 64, and the stand-in's GPU."""
    (tmp_path / "pci" / "0000:3b:00.0").mkdir(parents=True)
    (tmp_path / "pci" / "0000:3b:00.0" / "numa_node").write_text("1\n")
    (tmp_path / "nodes" / "node1").mkdir(parents=True)
    (tmp_path / "nodes" / "node1" / "cpulist").write_text("0-0,64\n")
    monkeypatch.setattr(pinned, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(pinned, "NODES", tmp_path / "nodes")
    return tmp_path


def test_without_cupy_memory_is_registered(gpu: Machine) -> None:
    assert cupy_or_none() is None
    memory = PinnedMemory(MIB, None)
    assert gpu.host_memory.pinned == {memory.pointer: MIB}
    assert memory.pointer % 4096 == 0
    memory.free()
    assert gpu.host_memory.pinned == {}


def test_the_driver_refuses_and_the_device_goes_on(gpu: Machine) -> None:
    gpu.host_memory.most_bytes = MIB
    with pytest.raises(OSError, match="2097152 bytes of host memory could not be pinned: CUDA error 2"):
        PinnedMemory(2 * MIB, None)
    device = CudaDevice(WHERE)
    with pytest.warns(
        RuntimeWarning, match=r"could not be pinned \(CUDA error 2\): swapped values lie in pageable memory"
    ):
        device.reserve_host(2 * MIB)
    assert device.host_tier == "pageable"
    content = torch.arange(MIB, dtype=torch.uint8, device=WHERE)
    out = copy_out(device, content.untyped_storage(), 0)
    out.wait()
    assert out.error is None
    back = device.allocate(MIB)
    copy_in(device, back, 0).wait()
    assert torch.equal(torch.empty(0, dtype=torch.uint8, device=WHERE).set_(back), content)
    device.close()


def test_cupys_refusal_is_an_os_error_too() -> None:
    with on_stand_in() as gpu:
        gpu.host_memory.most_bytes = MIB
        with pytest.raises(OSError, match="could not be pinned: cudaErrorMemoryAllocation: out of memory"):
            PinnedMemory(2 * MIB, cupy_or_none())


@pytest.mark.parametrize("broken", ["PinnedMemory", "memcpyAsync"])
def test_a_cupy_that_does_not_fit_the_driver_is_told_once_and_a_session_goes_on_without(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["residual"]
    with on_stand_in() as gpu:
        cupy: Any = cupy_or_none()

        def fails(*_: object) -> None:
            raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorInsufficientDriver: too old\nand more")

        monkeypatch.setattr(cupy.cuda if broken == "PinnedMemory" else cupy.cuda.runtime, broken, fails)
        with pytest.warns(RuntimeWarning, match=r"CuPy stand-in does not work .*\(CUDARuntimeError: .*: too old\)"):
            plan = random_plan(case.new_profile(), 0, (0, 1, 0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            followed(case, plan, 1, wanted=train(case, 1)[0])
        assert gpu.violations == []
        assert gpu.host_memory.pinned == {}


@pytest.fixture
def runtime_library(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A CUDA runtime that is found by its name (12) and whose copies the stand-in queues; the names asked for."""
    asked: list[str] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    def copy(to: int, source: int, size_bytes: int, kind: int, stream: int | None) -> int:
        if size_bytes > 4 * MIB:
            return 1
        gpu.copy_asynchronously(to, source, size_bytes, kind, stream or 0)
        return 0

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(pinned.ctypes, "CDLL", lambda name: asked.append(name) or SimpleNamespace(cudaMemcpyAsync=copy))
    yield asked
    monkeypatch.undo()


def test_without_cupy_copies_are_queued_by_the_runtime_that_torch_has_loaded(
    gpu: Machine, runtime_library: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    device = CudaDevice(WHERE)
    device.reserve_host(MIB)
    storage = device.allocate(MIB)
    out = copy_out(device, storage, 0)
    out.wait()
    back = copy_in(device, storage, 0)
    back.wait()
    assert out.error is None
    assert back.error is None
    device.close()
    assert runtime_library == ["libcudart.so.12"]


@pytest.mark.usefixtures("gpu", "runtime_library")
def test_a_copy_that_the_runtime_refuses_is_an_error() -> None:
    queue = memcpy_async(None)
    assert queue is not None
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        queue(1, 2, 5 * MIB, 1, 0)


@pytest.mark.usefixtures("gpu")
def test_a_runtime_that_is_not_found_leaves_the_copies_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    assert memcpy_async(None) is None


def test_a_session_whose_slab_is_refused_swaps_to_pageable_memory_and_is_exact(gpu: Machine) -> None:
    case = CASES["residual"]
    plan = random_plan(case.profile(), 0, (0, 1, 0))
    gpu.host_memory.most_bytes = 1
    wanted = train(case, 1)[0]
    with warnings.catch_warnings():  # told once in a process
        warnings.simplefilter("ignore")
        found, report = train(case, 1, plan)
    assert equal(wanted, found)
    assert report is not None
    assert report.last_step.fallbacks == 0
    assert report.last_step.out_bytes > 0
    assert gpu.violations == []


@pytest.mark.parametrize("cupy", [True, False])
def test_more_than_is_left_is_refused_before_a_page_is_touched(cupy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "available_bytes", lambda: MIB)
    with on_stand_in(cupy=cupy) as gpu:
        monkeypatch.setattr(pinned, "_mapped", None)
        with pytest.raises(OSError, match="2097152 bytes of host memory could not be pinned: 1048576 are left"):
            PinnedMemory(2 * MIB, cupy_or_none())
        assert gpu.host_memory.pinned == {}


def test_a_child_of_a_fork_has_no_part_in_it(gpu: Machine) -> None:
    memory = PinnedMemory(4 * MIB, None)
    assert is_mapped(memory.pointer)
    child = os.fork()
    if child == 0:
        os._exit(1 if is_mapped(memory.pointer) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    memory.free()


def test_it_is_touched_on_the_node_of_the_gpu_and_the_caller_stays_where_it_was(
    gpu: Machine, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[int]] = []
    set_affinity = os.sched_setaffinity

    def noted(process: int, processors: set[int]) -> None:
        asked.append(set(processors))
        set_affinity(process, processors)

    before = os.sched_getaffinity(0)
    first = min(before)
    (sysfs / "nodes" / "node1" / "cpulist").write_text(f"{first}-{first},100000\n")
    assert processors_near(WHERE) == {first}
    monkeypatch.setattr(os, "sched_setaffinity", noted)
    device = CudaDevice(WHERE)
    device.reserve_host(MIB)
    device.close()
    assert {first} in asked
    assert os.sched_getaffinity(0) == before


def test_a_system_that_does_not_tell_the_node_leaves_it_open(gpu: Machine, sysfs: Path) -> None:
    (sysfs / "pci" / "0000:3b:00.0" / "numa_node").write_text("-1\n")
    assert processors_near(WHERE) == frozenset()
    (sysfs / "pci" / "0000:3b:00.0" / "numa_node").unlink()
    assert processors_near(WHERE) == frozenset()


def test_every_page_is_touched_by_some_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_LEAST_BYTES_A_THREAD", 4096)
    size_bytes = 5 * 4096 + 17
    whole = torch.ones(size_bytes, dtype=torch.uint8)
    pinned._touch(whole.data_ptr(), size_bytes, frozenset(os.sched_getaffinity(0)))
    assert not whole.any()
