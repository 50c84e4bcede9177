"""Every kind of op is replayed bitwise: gradients, buffers and generators, at the bytes simulated."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.schedule import Schedule, assemble
from poochplan.planner.simulator.simulate import simulate
from tests.depth import DEEP
from tests.planner.plans import plan_with, random_decisions, random_tuning
from tests.runtime import (
    kinds_data,  # noqa: F401 - these three enter their kinds
    kinds_layers,  # noqa: F401
    kinds_storage,  # noqa: F401
)
from tests.runtime.kinds import KINDS, Kind
from tests.runtime.nets import TORCH, followed, in_core, snapshot, taken

NEVER_MINE = "it was there before the step"
"""Why inputs and constants are not recomputed."""
NOT_THERE = ("No available kernel", "No viable backend", "derivative for aten::aminmax is not implemented")
"""What plain training says where it cannot be done."""


def all_that_may_be(problem: Problem) -> list[Decision]:
    return [
        Decision.KEEP if reason or replay is None else Decision.RECOMPUTE
        for reason, replay in zip(problem.must_keep, problem.replay.replays, strict=True)
    ]


def skip_where_there_is_no_kernel(case: Kind) -> None:
    """Or no derivative in this torch."""
    try:
        in_core(case, 2)
    except RuntimeError as error:
        if not any(reason in str(error) for reason in NOT_THERE):
            raise
        pytest.skip(f"no kernel on the cpu device: {error}"[:100])


@pytest.mark.parametrize("name", KINDS)
def test_it_is_replayed_bitwise_at_the_bytes_simulated(name: str, running_on: str) -> None:
    """By day everything is replayed on the CPU device, and a mixture of decisions followed on the adversarial one."""
    case = KINDS[name]
    if running_on == "adversarial" and "cumsum" in name and TORCH < (2, 12):
        pytest.skip(
            "torch 2.11's backward of cumprod has other bits under any dispatch mode, as this device's clock is"
        )
    skip_where_there_is_no_kernel(case)
    profile = case.profile()
    problem = build_problem(profile)
    everything = assemble(problem, all_that_may_be(problem), {})
    some = fit(
        problem,
        random_decisions(problem, 1),
        (smallest_budget(profile) + profile.in_core_peak_bytes) // 2,
        tuning=random_tuning(problem, 1),
    )

    def run(schedule: Schedule) -> int:
        found = followed(case, plan_with(profile, schedule)).last_step
        assert 0 <= simulate(problem, schedule).peak_bytes - found.peak_bytes <= case.mode_bytes
        return found.replayed_values

    if DEEP or running_on == "cpu":
        assert run(everything) == everything.decisions.count(Decision.RECOMPUTE) >= case.least
    if DEEP or running_on == "adversarial":
        run(some)
    reasons = {reason for reason in problem.replay.reasons if reason not in ("", NEVER_MINE)}
    unexpected = [reason for reason in reasons if not any(part in reason for part in case.refused)]
    assert not unexpected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_scaled_losses_under_autocast_step_and_skip_as_in_core(dtype: torch.dtype) -> None:
    batch = torch.randn(8, 16)

    def start() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.LayerNorm(16))
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def loss_of(model: nn.Module, scaler: torch.amp.GradScaler) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            loss = (model(batch).float() * 100).square().mean()
        scaled: torch.Tensor = scaler.scale(loss)
        return scaled

    def run(plan: poochplan.Plan | None) -> list[list[torch.Tensor]]:
        model, optimizer, scaler = start()
        seen = []
        torch.manual_seed(1)
        with contextlib.nullcontext() if plan is None else poochplan.apply(plan, model) as session:
            for _ in range(4):
                optimizer.zero_grad(set_to_none=True)
                loss = loss_of(model, scaler)
                loss.backward()
                scaler.step(optimizer)
                scaler.update()
                seen.append([*snapshot(model, loss), torch.tensor(scaler.get_scale())])
        if session is not None:
            assert session.report().total.fallbacks == 0
            assert session.report().last_step.replayed_values > 4
        return seen

    model, optimizer, scaler = start()
    profile = taken(lambda: loss_of(model, scaler), model, optimizer)
    problem = build_problem(profile)
    plan = plan_with(profile, assemble(problem, all_that_may_be(problem), {}))
    reference, planned = run(None), run(plan)
    scales = {float(step[-1]) for step in reference}
    assert len(scales) > 1 or dtype is torch.bfloat16  # a step overflowed and was skipped
    for wanted, found in zip(reference, planned, strict=True):
        assert all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(wanted, found, strict=True))
