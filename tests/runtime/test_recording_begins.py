"""Recording is switched on and off within ops: what it reads there is never taken for a write that there was not."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from poochplan.runtime.replays.replay import WRITTEN_SINCE
from tests.runtime.nets import Case, equal, in_core, train
from tests.runtime.random_plans import random_plan, windowed

Tensor = torch.Tensor
Forward = Callable[["Twice", Tensor], Tensor]
STEPS = 3
"""From the second on the version counters of parameters are not at zero."""
WINDOWS = 30
"""Plans of each program; few of them begin to record where it matters."""
BATCH = torch.linspace(-2, 2, 8 * 16).reshape(8, 16)


class Twice(nn.Module):
    """Layers for a forward that reads something in two windows of recording."""

    def __init__(self, body: Forward) -> None:
        super().__init__()
        self.first, self.shared, self.body = nn.Linear(16, 16), nn.Linear(16, 16), body
        self.writes = False

    def forward(self, batch: Tensor) -> Tensor:
        return self.body(self, batch)


def a_layer_called_twice(self: Twice, batch: Tensor) -> Tensor:
    return self.shared(self.shared(batch).sin()).sin()


def an_activation_as_a_bias(self: Twice, batch: Tensor) -> Tensor:
    """It has been written, and nothing saves it."""
    bias = self.first(batch[0]).add_(1)
    hidden = self.shared(batch).sin()
    hidden = hidden + (bias * 2).sin()
    return (F.linear(hidden, self.shared.weight, bias).sin() + bias).sin()


def weights_without_a_gradient(self: Twice, batch: Tensor) -> Tensor:
    hidden = F.linear(self.first(batch).sin(), self.shared.weight.data, self.shared.bias.data).sin()
    return self.shared(hidden.sin()).sin()


def and_the_other_way_round(self: Twice, batch: Tensor) -> Tensor:
    hidden = self.first(self.shared(batch).sin()).sin()
    return F.linear(hidden, self.shared.weight.data, self.shared.bias.data).sin()


def filled_in_parts(self: Twice, batch: Tensor) -> Tensor:
    """What may be written behind its last use is saved by nobody."""
    value = self.first(batch)
    whole = torch.empty_like(value)
    whole[:, :8] = value[:, 8:]
    whole[:, 8:] = value[:, :8]
    hidden = (whole * 2).sin()
    if self.writes:
        whole.detach().mul_(3)
    return self.shared(hidden).sin()


PROGRAMS = [a_layer_called_twice, an_activation_as_a_bias, weights_without_a_gradient, and_the_other_way_round]


@functools.cache
def case_of(body: Forward, *, writes: bool = False) -> Case:
    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        model = Twice(body)
        model.writes = writes
        return model, lambda model: model(BATCH).square().sum()

    return Case(make)


def _planned(body: Forward, seed: int, *, writes: bool = False) -> list[list[Tensor]]:
    """Nothing meters the steps: so an op is dispatched as before when recording begins in it."""
    plan = windowed(random_plan(case_of(body).profile(), seed, (0, 0, 1)), seed)
    return train(case_of(body, writes=writes), STEPS, plan, meter="never", arena="off")[0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("body", PROGRAMS)
def test_a_right_program_trains_bitwise_as_in_core_wherever_recording_begins(body: Forward) -> None:
    for seed in range(WINDOWS):
        assert equal(in_core(case_of(body), STEPS), _planned(body, seed)), seed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_write_into_what_no_replay_builds_is_noticed_where_it_is_not_recorded() -> None:
    wanted, noticed = in_core(case_of(filled_in_parts, writes=True), STEPS), 0
    for seed in range(WINDOWS):
        try:
            found = _planned(filled_in_parts, seed, writes=True)
        except RuntimeError as error:
            if WRITTEN_SINCE not in str(error):
                raise
            noticed += 1
        else:
            assert equal(wanted, found), seed
    assert noticed
