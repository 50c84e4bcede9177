"""Autograd computes without a dispatch mode of ours on the stack: under one some backwards take other formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.runtime.arena.step_arena import ArenaMode
from poochplan.runtime.metering import allocated
from poochplan.runtime.metering.step_meter import When
from poochplan.torch_private.tensor_internals import mode_count
from tests.runtime.nets import taken
from tests.runtime.random_plans import decided

pytestmark = pytest.mark.cpu_device  # the other one has a mode of its own
STEPS, BATCH, WIDTH = 60, 64, 16
Gradients = list[list[torch.Tensor]]


class NoisyOr(nn.Module):
    """The product of what each cause leaves out: its backward asks whether a mode looks on."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8), nn.Sigmoid()]
        self.causes = nn.Sequential(*layers)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (1 - self.causes(batch)).prod(dim=1)


def fresh() -> tuple[NoisyOr, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = NoisyOr()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Gradients:
    """Loss and gradients of each step."""
    seen, numbers = [], torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.randn(BATCH, WIDTH, generator=numbers)).mean()
        loss.backward()
        seen.append([loss.detach().clone(), *(one.grad.clone() for one in model.parameters())])
        optimizer.step()
    return seen


def plan_of(profile: Profile, decision: Decision) -> Plan:
    return decided(profile, [decision], arena="off")


def steps_that_differ(one: Gradients, other: Gradients) -> int:
    return sum(any(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def plain() -> Gradients:
    return trained(*fresh())


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profiled()


def profiled() -> Profile:
    model, optimizer = fresh()
    batch = torch.zeros(BATCH, WIDTH)
    return taken(lambda: model(batch).mean(), model, optimizer)


@pytest.mark.parametrize(
    ("arena", "meter", "is_counted"),
    [*itertools.product(("auto", "off"), ("first-steps", "always", "never"), (True,)), ("off", "always", False)],
)
@pytest.mark.parametrize("decision", list(Decision))
def test_every_step_of_a_noisy_or_has_plains_bits(
    decision: Decision,
    arena: ArenaMode,
    meter: When,
    is_counted: bool,
    profile: Profile,
    plain: Gradients,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where there is no compiled allocator that counts."""
    if not is_counted:
        monkeypatch.setattr(allocated, "_counted", lambda: None)
    plan, (model, optimizer) = plan_of(profile, decision), fresh()
    with poochplan.apply(plan, model, meter=meter, arena=arena) as session:
        found = trained(model, optimizer)
    assert steps_that_differ(plain, found) == 0
    assert session.report().steps_followed == STEPS
    assert is_counted or session.report().last_step.peak_bytes is not None
    assert {value.decision for value in plan.values} >= {decision}


@pytest.mark.parametrize("decision", list(Decision))
def test_no_mode_is_on_the_stack_in_any_node_of_backward(decision: Decision, profile: Profile) -> None:
    counts: list[int] = []
    plan, (model, optimizer) = plan_of(profile, decision), fresh()
    for parameter in model.parameters():
        parameter.register_hook(lambda _: counts.append(mode_count()))
    with poochplan.apply(plan, model, meter="always"):
        trained(model, optimizer)
    assert counts == [0] * STEPS * 6


def test_a_backward_amid_forward_sees_no_mode_and_recording_goes_on_behind_it() -> None:
    """A gradient of something else, which saved nothing, is taken while forward is recorded."""
    plan, counts = plan_of(profiled(), Decision.RECOMPUTE), list[int]()
    model, optimizer = fresh()
    other = torch.ones(3, requires_grad=True)
    other.register_hook(lambda _: counts.append(mode_count()))
    model.causes[2].register_forward_pre_hook(lambda *_: other.sum().backward())
    with poochplan.apply(plan, model) as session:
        trained(model, optimizer)
    assert counts == [0] * STEPS
    assert session.report().total.fallbacks == 0
    assert session.report().total.replayed_values > STEPS
