"""A network with detours: steps of it that are other than planned, and what the tests of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import poochplan
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.runtime.metering.allocated import aside
from poochplan.runtime.metering.census import leave_out
from poochplan.runtime.run_report import Report
from tests.runtime.nets import LINK, Residual, equal, our_warnings

WIDTH = 8
Step = Callable[[nn.Module], torch.Tensor]


class Detour(Residual):
    """The residual network with the order of its blocks open: one may be left out or come twice. And it may work on
    several copies of what it is given.
    """

    order: Sequence[int] = (0, 1, 2)
    copies: int = 1

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.copies > 1:
            images = images.repeat(self.copies, 1, 1, 1)
        for block in self.order:
            images = images + self.blocks[block](images)
        return self.head(images.mean((2, 3)))


def images_step(
    batch_size: int = 4, *, side: int = 16, order: Sequence[int] = (0, 1, 2), autocast: bool = False
) -> Step:
    images = torch.randn(batch_size, WIDTH, side, side, generator=torch.Generator().manual_seed(batch_size))

    def step(model: nn.Module) -> torch.Tensor:
        model.order = order
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            return model(images).float().square().mean()

    return step


def fresh_model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def profile_of(make: Callable[[], nn.Module], step: Step, **options: Any) -> poochplan.Profile:
    model = fresh_model(make)
    return poochplan.profile(lambda: step(model), model=model, iterations=1, link=LINK, **options)


def gradients_of(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the gradients of it alone; none are left in the model."""
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    with _disable_current_modes(), aside():  # or a meter would count the copies as the step's own
        found = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        leave_out(found)
    model.zero_grad(set_to_none=True)
    return found


def in_core_steps(make: Callable[[], nn.Module], steps: Sequence[Step]) -> list[list[torch.Tensor]]:
    model = fresh_model(make)
    torch.manual_seed(1)
    return [gradients_of(model, step(model)) for step in steps]


def under(
    plan: Plan | PlanSet, make: Callable[[], nn.Module], steps: Sequence[Step], **options: Any
) -> tuple[list[Report], list[str]]:
    """Steps of a fresh model in a session, bitwise those in-core: the report behind each, and our warnings."""
    model, seen, reports = fresh_model(make), [], []
    with our_warnings() as told, poochplan.apply(plan, model, **options) as session:
        torch.manual_seed(1)
        for step in steps:
            seen.append(gradients_of(model, step(model)))
            reports.append(session.report())
    assert equal(seen, in_core_steps(make, steps))
    return reports, told


def under_announced(
    plan: Plan | PlanSet, use: Callable[[nn.Module, Callable[[], object]], list[list[torch.Tensor]]]
) -> Report:
    """``use(model, announce)`` gives the same in-core and under the plan, where each step is announced."""
    model = fresh_model(Detour)
    torch.manual_seed(1)
    reference = use(model, lambda: None)
    model = fresh_model(Detour)
    with poochplan.apply(plan, model) as session:
        torch.manual_seed(1)
        assert equal(reference, use(model, session.step))
    return session.report()


def restarted(model: nn.Module) -> nn.Module:
    """With the running statistics of a fresh model; its gradients go."""
    for name, buffer in model.named_buffers():
        buffer.copy_(torch.ones_like(buffer) if "running_var" in name else torch.zeros_like(buffer))
    return model
