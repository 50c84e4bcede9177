"""What a step saves where a mode records it is compared with what it saves where none does."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.profile import Profile
from poochplan.formats.queries import saved_values
from poochplan.profiler.trials.compare import RECORDED
from poochplan.torch_private.tensor_internals import mode_count
from tests.runtime.nets import taken


class Watched(nn.Module):
    """A layer of users' code that computes otherwise where a dispatch mode looks on."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1.0 + 2.0**-20 * bool(mode_count()))


class Expert(nn.Module):
    """Multiplies by one weight of two: here by the other one just where a mode looks on."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.full((32,), 1.0), torch.full((32,), 2.0)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weights[bool(mode_count())]


class HalfWritten(torch.autograd.Function):
    """A square that saves its argument at the head of memory of which it writes nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(1 << 15)  # a mapping of its own, so that it holds zeros if nothing fills it
        if mode_count():
            ctypes.memset(memory.data_ptr(), 7, memory.nbytes)  # as if it had been used before
        memory[: hidden.numel()] = hidden.flatten()
        ctx.save_for_backward(memory)
        return hidden.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (memory,) = ctx.saved_tensors
        return 2 * gradient * memory[: gradient.numel()].view_as(gradient)


class HalfSaved(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        squared: torch.Tensor = HalfWritten.apply(hidden)
        return squared


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), *layers, nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh())


def profiled(model: nn.Module, batches: Iterator[torch.Tensor] | None = None) -> Profile:
    batches = batches or itertools.repeat(torch.ones(16, 32))
    return taken(lambda: model(next(batches)).square().mean(), model, torch.optim.Adam(model.parameters()))


def reasons(profile: Profile) -> set[str]:
    return {value.unreplayable for value in profile.values}


def test_nothing_is_recomputed_of_a_step_that_recording_alone_would_change() -> None:
    profile = profiled(net(Watched()))
    assert RECORDED in reasons(profile)
    plan = poochplan.plan(profile, poochplan.smallest_budget(profile), evaluations=50)
    assert {value.decision for value in plan.values} <= {"keep", "swap"}


def test_a_step_that_draws_numbers_is_compared_from_one_state() -> None:
    profile = profiled(net())
    assert RECORDED not in reasons(profile)
    assert any(not profile.values[one].unreplayable for one in saved_values(profile))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library does not fill new memory")
@pytest.mark.parametrize(("layers", "is_moved"), [([], False), ([Watched()], True)], ids=["alone", "beside one moved"])
def test_what_a_step_saves_of_memory_that_nothing_wrote_is_not_compared(
    layers: list[nn.Module], is_moved: bool
) -> None:
    profile = profiled(net(HalfSaved(), *layers))
    assert (RECORDED in reasons(profile)) is is_moved
    assert any(not profile.values[one].unreplayable for one in saved_values(profile)) is not is_moved


@pytest.mark.parametrize("layers", [[], [Expert()]], ids=["one way", "ways that data choose"])
def test_a_step_of_other_data_each_time_tells_nothing_of_recording(layers: list[nn.Module]) -> None:
    numbers = torch.Generator().manual_seed(0)
    profile = profiled(net(*layers), iter(lambda: torch.randn(16, 32, generator=numbers), None))
    assert RECORDED not in reasons(profile)
