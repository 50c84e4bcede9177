"""A step of an imported model, in-core and under plans that swap and recompute everything."""

from __future__ import annotations

from pathlib import Path

import torch

import poochplan


def assert_planned_is_in_core(model: torch.nn.Module, batch: torch.Tensor, spill_dir: Path) -> None:
    """Gradients and what the step leaves in the model are the same to the bit."""
    model.train()
    begin = state(model)
    _, in_core = gradients(model, batch)
    end = state(model)
    profile = poochplan.profile(
        lambda: model(batch).square().mean(), model=model, iterations=1, warmup=1, spill_dir=spill_dir
    )
    for policy in ("swap-all-on-demand", "recompute-all"):
        plan = poochplan.plan(profile, 1 << 30, policy=policy, arena="off")
        model.load_state_dict(begin)
        model.zero_grad()
        with poochplan.apply(plan, model, spill_dir=spill_dir) as session:
            _, planned = gradients(model, batch)
        step = session.report().last_step
        assert step.out_bytes if policy == "swap-all-on-demand" else step.replayed_values
        assert session.report().steps_followed == 1
        assert all(map(torch.equal, planned, in_core))
        assert all(map(torch.equal, state(model).values(), end.values()))


def gradients(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one step; each parameter has one."""
    model.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    return loss.detach(), [weight.grad.clone() for weight in model.parameters()]


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of its parameters and buffers."""
    return {key: value.clone() for key, value in model.state_dict().items()}
