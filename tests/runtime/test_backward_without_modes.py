"""Autograd computes without a dispatch mode of ours on the stack: under one some backwards take other formulas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision
from poochplan.runtime.arena.step_arena import ArenaMode
from poochplan.runtime.metering import allocated
from poochplan.runtime.metering.step_meter import When
from poochplan.runtime.run_report import Report
from poochplan.torch_private.tensor_internals import mode_count
from tests.runtime.nets import Case, Loop, Net, followed
from tests.runtime.random_plans import decided

pytestmark = pytest.mark.cpu_device  # the other one has a mode of its own
STEPS, WIDTH = 60, 16


def make() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A noisy or, the product of what each cause leaves out: its backward asks whether a mode looks on."""
    layers = [nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8), nn.Sigmoid()]
    net = Net(lambda net, batch: (1 - net.causes(batch)).prod(dim=1), causes=nn.Sequential(*layers))
    numbers = torch.Generator().manual_seed(1)
    return net, lambda model: model(torch.randn(64, WIDTH, generator=numbers)).mean()


CASE = Case(make, functools.partial(torch.optim.SGD, lr=0.1))


def plan_of(decision: Decision) -> poochplan.Plan:
    plan = decided(CASE.profile(), [decision], arena="off")
    assert decision in {value.decision for value in plan.values}
    return plan


@pytest.mark.parametrize(
    ("arena", "meter", "is_counted"),
    [*itertools.product(("auto", "off"), ("first-steps", "always", "never"), (True,)), ("off", "always", False)],
)
@pytest.mark.parametrize("decision", list(Decision))
def test_every_step_of_a_noisy_or_has_plains_bits(
    decision: Decision, arena: ArenaMode, meter: When, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no compiled allocator that counts."""
    plan = plan_of(decision)
    if not is_counted:
        monkeypatch.setattr(allocated, "_counted", lambda: None)
    report = followed(CASE, plan, STEPS, meter=meter, arena=arena)
    assert report.steps_followed == STEPS
    assert is_counted or report.last_step.peak_bytes is not None


def trained(loop: Loop, decision: Decision, meter: When = "first-steps") -> Report:
    with poochplan.apply(plan_of(decision), loop.model, meter=meter) as session:
        for _ in range(STEPS):
            loop.step()
    return session.report()


@pytest.mark.parametrize("decision", list(Decision))
def test_no_mode_is_on_the_stack_in_any_node_of_backward(decision: Decision) -> None:
    counts, loop = list[int](), Loop(CASE)
    for parameter in loop.model.parameters():
        parameter.register_hook(lambda _: counts.append(mode_count()))
    trained(loop, decision, meter="always")
    assert counts == [0] * STEPS * 6


def test_a_backward_amid_forward_sees_no_mode_and_recording_goes_on_behind_it() -> None:
    """A gradient of something else, which saved nothing, is taken while forward is recorded."""
    counts, loop = list[int](), Loop(CASE)
    other = torch.ones(3, requires_grad=True)
    other.register_hook(lambda _: counts.append(mode_count()))
    layer = loop.model.get_submodule("causes.2")
    layer.register_forward_pre_hook(lambda *_: other.sum().backward())  # type: ignore[no-untyped-call]
    total = trained(loop, Decision.RECOMPUTE).total
    assert counts == [0] * STEPS
    assert total.fallbacks == 0
    assert total.replayed_values > STEPS
