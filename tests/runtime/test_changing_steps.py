"""A loop whose sequence of ops changes: what is replayed is what ran in this step, whatever ran in those before.

What tensors of all steps share (their geometries) must never stand for another one. Nothing else of a step is used in
the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision, Plan
from tests.runtime.detours import Step, fresh_model, gradients_of, profile_of, under
from tests.runtime.nets import Net, equal
from tests.runtime.random_plans import random_plan

PLANNED = "as planned"


def _zeroed_head(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[:5].zero_()
    return x


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    PLANNED: lambda h: h + 1,
    "another op": lambda h: h * 2,
    "another number": lambda h: h + 3,
    "one op more": lambda h: (h + 1) * 0.5,
    "a write in place": lambda h: (h + 1).mul_(0.5),
    "a write to a part": lambda h: _zeroed_head(h + 1),
    "a write to what was read": lambda h: h.add_(1),
    "other strides": lambda h: (h + 1).t().contiguous().t(),
    "the first rows": lambda h: h + h[:4].repeat(2, 1),
    "the last rows": lambda h: h + h[4:].repeat(2, 1),
    "random numbers": lambda h: h + torch.rand_like(h),
    "more random numbers": lambda h: h + torch.rand(3).sum() + torch.rand_like(h),
    "without gradients in between": lambda h: h + h.detach().mul(2).sigmoid_(),
}
"""What runs between two saves, of which the plan knows nothing: shapes and bytes of what is saved are the same."""


def square() -> Net:
    """Saves the same in every step; ``between`` is what it computes from."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        low = torch.tanh(net.between(net.linear(batch)))
        high = torch.sigmoid(torch.tanh(low * 3 + net.scale) * 2)
        return (high @ high.t()).sum()

    scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
    return Net(body, linear=nn.Linear(8, 8), scale=scale, between=BETWEEN[PLANNED])


@functools.cache
def _batch(rows: int) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 8).view(rows, 8)


def _step(name: str, rows: int = 8) -> Step:
    def step(model: nn.Module) -> torch.Tensor:
        model.between = BETWEEN[name]
        return model(_batch(rows))

    return step


@functools.cache
def _plan() -> Plan:
    plan = random_plan(profile_of(square, _step(PLANNED)), 0, (0, 0, 1))
    assert [value.decision for value in plan.values].count(Decision.RECOMPUTE) >= 3
    return plan


def _replayed(steps: list[Step]) -> tuple[list[int], list[str]]:
    """How many values each step has replayed, and what was told."""
    reports, told = under(_plan(), square, steps)
    return [one.last_step.replayed_values for one in reports], told


@pytest.mark.parametrize("name", [name for name in BETWEEN if name != PLANNED])
def test_replays_follow_what_ran_now(name: str) -> None:
    steps = [PLANNED, PLANNED, name, PLANNED, name, name, PLANNED]
    replayed, told = _replayed([_step(one) for one in steps])
    assert told == []
    assert len(set(replayed)) == 1
    assert replayed[0] >= 3


def _swapped(model: Net) -> None:
    """Another tensor behind the same object."""
    torch.utils.swap_tensors(model.scale, nn.Parameter(model.scale.detach() * 2))


def _replaced(model: Net) -> None:
    model.scale = nn.Parameter(model.scale.detach() * 2)


def _reseated(model: Net) -> None:
    """The same tensor in another memory."""
    model.scale.data = model.scale.detach() * 2


def _stepped(model: Net) -> None:
    with torch.no_grad():
        model.scale.add_(1)


CHANGES = [lambda model: None, _swapped, _replaced, _reseated, _stepped]


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_changes_between_steps_is_read_as_it_is_now_and_written_before_a_replay_an_error(
    change: Callable[[Net], None],
) -> None:
    model, step = fresh_model(square), _step(PLANNED)
    with poochplan.apply(_plan(), model) as session:
        for _ in range(3):
            gradients_of(model, step(model))
        change(model)
        found = gradients_of(model, step(model))
        with session.away():
            assert equal([gradients_of(model, step(model))], [found])
        assert session.report().total.fallbacks == 0
        loss = step(model)
        with torch.no_grad():
            model.scale.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]


def averaging() -> Net:
    """Replaces a buffer in its forward. The next storage that torch makes may get the identity of the old one's."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        low = (net.linear(batch) * net.mean.cos()).exp()
        net.mean = net.mean * 0.9 + low.detach().mean(0)
        return (low * net.mean.cos() * net.scale).sigmoid().sum()

    net = Net(body, linear=nn.Linear(8, 8), scale=nn.Parameter(torch.linspace(0.5, 1.5, 8)))
    net.register_buffer("mean", torch.zeros(8))
    return net


@pytest.mark.parametrize("weights", [(0, 1, 0), (0, 0, 1)])
def test_a_step_whose_forward_replaces_a_buffer_follows_its_plan(weights: tuple[float, float, float]) -> None:
    step: Step = lambda model: model(_batch(8))  # noqa: E731
    profile = profile_of(averaging, step)
    assert not [note for note in profile.notes if "steps differ" in note]
    reports, told = under(random_plan(profile, 0, weights), averaging, [step] * 5)
    assert [told, [one.last_step.fallbacks for one in reports]] == [[], [0] * 5]
