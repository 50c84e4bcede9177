"""Which GPU a model and a plan are for: opened, or refused with one line."""

from __future__ import annotations

import pytest
import torch

from poochplan.errors import UsageError
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.opening import model_device, open_device, usable_device
from tests.cuda_rules.machine import WHERE, Machine


def test_a_gpu_is_there_by_its_index_and_no_other_is(gpu: Machine) -> None:
    assert usable_device("cuda") == torch.device("cuda")
    assert usable_device("cuda:0") == WHERE
    with pytest.raises(UsageError, match="expected one of 1 CUDA devices, found 'cuda:3'"):
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
