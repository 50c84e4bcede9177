"""Recording is switched on and off within ops: what it reads there is never taken for a write that there was not."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poochplan
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.runtime.replays.replay import WRITTEN_SINCE
from tests.runtime.nets import LINK, equal
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
def _profile(body: Forward) -> Profile:
    torch.manual_seed(0)
    model = Twice(body)
    return poochplan.profile(lambda: model(BATCH).square().sum(), model=model, iterations=1, link=LINK)


def _train(body: Forward, plan: Plan | None, *, writes: bool = False) -> list[Tensor]:
    """The gradients of each step. Nothing meters them: so an op is dispatched as before when recording begins in it."""
    torch.manual_seed(0)
    model = Twice(body)
    model.writes = writes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)
        if plan is not None:
            stack.enter_context(poochplan.apply(plan, model, meter="never", arena="off"))
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            model(BATCH).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
    return found


@pytest.mark.parametrize("body", PROGRAMS)
def test_a_right_program_trains_bitwise_as_in_core_wherever_recording_begins(body: Forward) -> None:
    wanted = _train(body, None)
    for seed in range(WINDOWS):
        plan = windowed(random_plan(_profile(body), seed, (0, 0, 1)), seed)
        assert equal([wanted], [_train(body, plan)]), seed


def test_a_write_into_what_no_replay_builds_is_noticed_where_it_is_not_recorded() -> None:
    wanted, noticed = _train(filled_in_parts, None, writes=True), 0
    for seed in range(WINDOWS):
        plan = windowed(random_plan(_profile(filled_in_parts), seed, (0, 0, 1)), seed)
        try:
            found = _train(filled_in_parts, plan, writes=True)
        except RuntimeError as error:
            if WRITTEN_SINCE not in str(error):
                raise
            noticed += 1
        else:
            assert equal([wanted], [found]), seed
    assert noticed
