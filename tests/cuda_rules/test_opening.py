"""Which GPU a model and a plan are for: opened, or refused with one line."""

from __future__ import annotations

import pytest
import torch

from poochplan.errors import UsageError
from poochplan.runtime.devices.backend import backends_in_use
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.opening import model_device, open_device, usable_device
from poochplan.runtime.replays.tape import Recorder, Tape
from poochplan.runtime.run_report import MemoryPeaks
from poochplan.tensors.operators import traits
from tests.cuda_rules.machine import WHERE, Machine


def test_a_gpu_is_there_by_its_index_and_no_other_is(gpu: Machine) -> None:
    assert usable_device("cuda") == torch.device("cuda")
    assert usable_device("cuda:0") == WHERE
    with pytest.raises(UsageError, match="expected cuda:0, found 'cuda:3'; name that"):
        usable_device("cuda:3")


def test_a_model_lies_on_one_gpu_but_for_buffers_in_host_memory(gpu: Machine) -> None:
    model = torch.nn.BatchNorm1d(3).to("cuda")
    model.register_buffer("on_host", torch.zeros(3))
    assert model_device(model, "cuda") == WHERE
    model.running_mean = torch.zeros(3, device="meta")
    with pytest.raises(UsageError, match="expected every buffer on cuda:0, found running_mean on meta; build it with"):
        model_device(model, "cuda")
    with pytest.raises(UsageError, match="expected every parameter on cuda, found weight on cpu; move the model there"):
        model_device(torch.nn.Linear(3, 3), "cuda")


def test_the_device_that_is_opened_for_it_is_the_current_one(gpu: Machine) -> None:
    device = open_device(torch.device("cuda"), host_limit_bytes=1 << 20)
    assert isinstance(device, CudaDevice)
    assert device.where == WHERE
    device.close()


def test_a_number_in_host_memory_is_recorded_by_value() -> None:
    tape = Tape("meta")
    recorder = Recorder(tape)
    field, factor = torch.ones(4, device="meta"), torch.tensor(2.0)
    recorder.switch_on()
    scaled = field * factor
    with_host_tensor = torch.empty(1, device="meta").copy_(torch.ones(1))
    recorder.switch_off()
    factor.fill_(3.0)
    birth = tape.record_of(scaled).birth
    assert birth is not None
    assert birth.usable
    assert [x.item() for x in birth.arguments if isinstance(x, torch.Tensor)] == [2.0]
    assert not tape.record_of(with_host_tensor).is_known


def test_to_tell_the_allocator_of_a_stream_writes_nothing() -> None:
    facts = traits(torch.ops.aten.record_stream.default)
    assert facts.pure_view
    assert facts.written == ()


def test_a_device_must_be_known_and_hold_the_whole_model() -> None:
    assert usable_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match='expected "cpu", "cuda" or "cuda:N", found \'meta\''):
        usable_device("meta")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"expected every parameter on cpu, found 1\.weight on meta"):
        model_device(model, "cpu")


def test_fragmentation_is_what_was_reserved_and_never_used() -> None:
    assert MemoryPeaks(allocated_bytes=75, reserved_bytes=100).fragmentation == 0.25
    assert MemoryPeaks(allocated_bytes=0, reserved_bytes=0).fragmentation == 0.0


def test_what_runs_on_the_cpu_asks_for_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look whether CUDA is available starts its driver, which processes that fork afterwards cannot use."""

    def started() -> bool:
        raise AssertionError("the driver is started")

    monkeypatch.setattr(torch.cuda, "is_available", started)
    assert usable_device("cpu").type == "cpu"
    assert backends_in_use() == []
