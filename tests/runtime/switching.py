"""Sessions in which one plan follows another, while a step under the one before still waits for its backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

import poochplan
from poochplan.formats.plan import Plan
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.engine.host_tier import QUIET_STEPS, HostTier
from poochplan.runtime.session import Session
from tests.runtime.nets import Case
from tests.runtime.random_plans import random_plan

Gradients = list[torch.Tensor]


def host_bytes(plan: Plan) -> int:
    return HostTier([plan.instructions]).planned_bytes


def growing_plans(case: Case) -> list[Plan]:
    """Three plans of one step: they swap the fewest bytes, more, and all."""
    profile = case.profile()
    found = sorted((random_plan(profile, seed, (3, 1, 0)) for seed in range(8)), key=host_bytes)
    chosen = [found[0], found[-1], random_plan(profile, 0, (0, 1, 0))]
    assert 0 < host_bytes(chosen[0]) < host_bytes(chosen[1]) < host_bytes(chosen[2])
    return chosen


def follow(session: Session, plan: Plan) -> None:
    """Steps follow this plan from now on."""
    session._source._of[""].follow(plan)


def trained(case: Case, order: Sequence[Plan], device: Callable[[], ComputeDevice] | None = None) -> list[Gradients]:
    """Gradients of all steps, each plan's after another's."""
    model, step, _ = case.fresh()
    with warnings.catch_warnings(), poochplan.apply(order[0], model, device=device) as session:
        warnings.simplefilter("error")
        found = _trained(model, step, order, session)
        assert session.report().total.fallbacks == 0
    return found


def in_core(case: Case, order: Sequence[Plan]) -> list[Gradients]:
    """The same steps without a session."""
    model, step, _ = case.fresh()
    return _trained(model, step, order, None)


def _trained(
    model: torch.nn.Module, step: Callable[[], torch.Tensor], order: Sequence[Plan], session: Session | None
) -> list[Gradients]:
    """Under each plan two steps, and a third that is left over: its backward runs under the next plan, and once more
    under the last one. The first plan's runs once, at the very end, when memory has been given back.
    """
    seen: list[Gradients] = []

    def forward() -> torch.Tensor:
        if session is not None:
            session.step()
        return step()

    def backward(loss: torch.Tensor, *, again: bool = False) -> None:
        loss.backward(retain_graph=again)  # type: ignore[no-untyped-call]
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)

    left: list[torch.Tensor] = []
    for plan in order:
        if session is not None:
            follow(session, plan)
        for _ in range(2):
            backward(forward())
        if len(left) > 1:
            backward(left[-1], again=True)
        left.append(forward())
    while len(left) > 1:
        backward(left.pop())
    for _ in range(QUIET_STEPS + 1):
        backward(forward())
    backward(left.pop())
    return seen
