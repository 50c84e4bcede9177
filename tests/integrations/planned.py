"""A step of an imported model, in-core and under plans that swap and recompute everything."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

import poochplan
from tests.runtime.nets import Case, followed


def assert_planned_is_in_core(model: torch.nn.Module, batch: torch.Tensor, spill_dir: Path) -> None:
    """Gradients and what the step leaves in the model are the same to the bit."""
    case = Case(lambda: (copy.deepcopy(model).train(), lambda its: its(batch).square().mean()))
    profile = case.new_profile(warmup=1, spill_dir=spill_dir)
    for policy in ("swap-all-on-demand", "recompute-all"):
        plan = poochplan.plan(profile, 1 << 30, policy=policy, arena="off")
        report = followed(case, plan, steps=1, spill_dir=spill_dir)
        step = report.last_step
        assert step.out_bytes if policy == "swap-all-on-demand" else step.replayed_values
        assert report.steps_followed == 1


def gradients(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one step; each parameter has one."""
    model.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    return loss.detach(), [weight.grad.clone() for weight in model.parameters()]
