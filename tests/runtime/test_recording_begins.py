"""Recording is switched on and off within ops: what it reads there is never taken for a write that there was not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import poochplan
from poochplan.formats.plan import Plan, PointActions
from poochplan.runtime.replays.closure import WRITTEN_SINCE
from poochplan.runtime.replays.recorded import StorageRecord
from poochplan.runtime.replays.recorder import Recorder
from poochplan.runtime.replays.tape import Tape
from poochplan.runtime.run_report import FallbackKind, Report
from tests.runtime.nets import LINK
from tests.runtime.random_plans import random_plan

Tensor = torch.Tensor
Forward = Callable[["Twice", Tensor], Tensor]
STEPS = 3
"""From the second on the version counters of parameters are not at zero."""
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


def a_bias_of_attention(self: Twice, batch: Tensor) -> Tensor:
    """It is written before it is read, and nothing saves it."""
    bias = self.first(batch).add_(1)
    hidden = (bias * 2).sin().view(1, 8, 16)
    mixed = torch.baddbmm(bias.view(1, 8, 16), hidden, self.shared.weight.view(1, 16, 16))
    return (mixed + bias).sin()


def weights_without_a_gradient(self: Twice, batch: Tensor) -> Tensor:
    hidden = F.linear(batch, self.shared.weight.data, self.shared.bias.data).sin()
    return self.shared(self.first(hidden).sin()).sin()


def and_the_other_way_round(self: Twice, batch: Tensor) -> Tensor:
    hidden = self.first(self.shared(batch).sin()).sin()
    return F.linear(hidden, self.shared.weight.data, self.shared.bias.data).sin()


PROGRAMS = [a_layer_called_twice, a_bias_of_attention, weights_without_a_gradient, and_the_other_way_round]


def _plan(body: Forward, switches: Callable[[int], bool]) -> Plan:
    """Everything recomputed that can be; recording is on behind a save point or off."""
    torch.manual_seed(0)
    model = Twice(body)
    profile = poochplan.profile(lambda: model(BATCH).square().sum(), model=model, iterations=1, link=LINK)
    plan = random_plan(profile, 0, (0, 0, 1))
    points = {(actions.at, actions.index): actions for actions in plan.schedule}
    for index in range(len(plan.values)):
        actions = points.get(("save", index)) or PointActions(at="save", index=index)
        points["save", index] = msgspec.structs.replace(actions, record="on" if switches(index) else "off")
    ordered = sorted(points, key=lambda point: (point[0] == "use", point[1]))
    return msgspec.structs.replace(plan, schedule=tuple(points[point] for point in ordered))


def _train(body: Forward, plan: Plan | None, *, writes: bool = False) -> tuple[list[Tensor], Report | None]:
    torch.manual_seed(0)
    model = Twice(body)
    model.writes = writes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = poochplan.apply(plan, model, meter="never", arena="off") if plan is not None else None
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if session is not None:
            session.__enter__()
        try:
            for _ in range(STEPS):
                optimizer.zero_grad(set_to_none=True)
                model(BATCH).square().sum().backward()
                found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                optimizer.step()
        finally:
            if session is not None:
                session.__exit__(None, None, None)
    return found, session.report() if session is not None else None


@pytest.mark.parametrize("every", range(1, 5))
@pytest.mark.parametrize("first", range(2))
@pytest.mark.parametrize("body", PROGRAMS)
def test_a_right_program_trains_bitwise_as_in_core_wherever_recording_begins(
    body: Forward, every: int, first: int
) -> None:
    plan = _plan(body, lambda index: (index // every + first) % 2 == 0)
    found, report = _train(body, plan)
    assert report is not None
    assert FallbackKind.DIVERGED not in report.last_step.fallback_kinds
    for one, other in zip(_train(body, None)[0], found, strict=True):
        assert torch.equal(one, other)
