"""A profile puts back the modules, tensors and generators that a step changes, whatever it does to them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from poochplan.profiler.step.preserve import preserved
from poochplan.torch_private.tensor_internals import mode_stack
from tests.profiler.restoring import Net, everything, profile_of, train


def _replaces_a_parameter(net: Net) -> None:
    net.first.weight = nn.Parameter(net.first.weight.detach() * 2)


def _replaces_data(net: Net) -> None:
    net.first.weight.data = net.first.weight.detach() * 2


def _transposes_data(net: Net) -> None:
    net.first.weight.data = net.first.weight.data.t()


def _replaces_a_buffer(net: Net) -> None:
    net.norm.running_mean = torch.ones(8)


def _registers_buffers(net: Net) -> None:
    net.register_buffer("kept", torch.ones(3))
    net.register_buffer("unkept", torch.ones(3), persistent=False)


def _registers_a_parameter_and_a_module(net: Net) -> None:
    if not hasattr(net, "extra"):
        net.extra, net.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))


def _removes_a_buffer(net: Net) -> None:
    net.norm.register_buffer("num_batches_tracked", None)


def _makes_a_buffer_transient(net: Net) -> None:
    net.norm.register_buffer("running_var", net.norm.running_var, persistent=False)


def _reparametrizes(net: Net) -> None:
    if not nn.utils.parametrize.is_parametrized(net.last):
        parametrizations.weight_norm(net.last)


def _ends_training(net: Net) -> None:
    net.norm.eval()


def _freezes(net: Net) -> None:
    net.first.bias.requires_grad_(False)


def _draws(net: Net) -> None:
    random.random(), np.random.rand(), torch.rand(3)


CHANGES = [
    _replaces_a_parameter, _replaces_data, _transposes_data, _replaces_a_buffer, _registers_buffers,
    _registers_a_parameter_and_a_module, _removes_a_buffer, _makes_a_buffer_transient, _reparametrizes, _ends_training,
    _freezes, _draws,
]  # fmt: skip


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_what_forward_changes_is_back(change: Callable[[Net], object], momentum: float) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    train(model, optimizer)
    model.changes = change
    before = everything(model, optimizer)
    with preserved(model, optimizer):
        train(model, optimizer)
        assert everything(model, optimizer) != before
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("change", [_registers_buffers, _ends_training, _draws], ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize("mode", ["run", "swap-all"])
def test_a_whole_profile_leaves_everything_as_it_was(change: Callable[[Net], object], mode: str) -> None:
    model = Net(change)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):  # without a state of the optimizer and gradients, and with them
        before = everything(model, optimizer)
        profile_of(model, optimizer, mode=mode)
        assert everything(model, optimizer) == before
        train(model, optimizer)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_step_restores_everything_too(error: type[BaseException]) -> None:
    calls = 0

    def stops(net: Net) -> None:
        nonlocal calls
        calls += 1
        _registers_buffers(net)
        if calls == 3:
            raise error

    model = Net(stops)
    optimizer = torch.optim.Adam(model.parameters())
    before = everything(model, optimizer)
    with pytest.raises(error):
        profile_of(model, optimizer)
    assert calls == 3
    assert everything(model, optimizer) == before
    assert not mode_stack()


def test_a_compiled_model_is_back() -> None:
    model = torch.compile(Net(), backend="eager")
    optimizer = torch.optim.Adam(model.parameters())
    before = everything(model, optimizer)
    profile_of(model, optimizer)
    assert everything(model, optimizer) == before


def test_a_step_without_memory_leaves_everything_as_it_was() -> None:
    model = Net(_draws)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    before = everything(model, optimizer)
    profile_of(model, optimizer, mode="fake", roofline="v100", iterations=None)
    assert everything(model, optimizer) == before


def test_a_generator_that_a_module_owns_is_back() -> None:
    model = Net(lambda net: torch.rand(3, generator=net.first.own))
    model.first.own = torch.Generator().manual_seed(3)
    state = model.first.own.get_state()
    profile_of(model)
    assert torch.equal(model.first.own.get_state(), state)
