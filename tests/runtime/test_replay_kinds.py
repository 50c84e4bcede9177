"""Every kind of op is replayed bitwise: gradients, buffers and generators, at the bytes simulated."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from poochplan.formats.plan import Decision
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule, assemble
from poochplan.planner.simulator.simulate import simulate
from poochplan.runtime.session import Session
from tests.depth import DEEP
from tests.planner.plans import plan_with, random_decisions, random_tuning
from tests.runtime import kinds_layers  # noqa: F401 - it enters its kinds
from tests.runtime.kinds import KINDS, Kind
from tests.runtime.nets import TORCH, Case, either_way, followed, in_core, snapshot
from tests.runtime.served import needs_compiler

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


@needs_compiler
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
    problem = Problem.of(profile)
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
    layers = nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.LayerNorm(16)
    initial, batch, scales = nn.Sequential(*layers), torch.randn(8, 16), list[float]()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    fresh_scaler = scaler.state_dict()

    def loss_of(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            loss = (model(batch).float() * 100).square().mean()
        return scaler.scale(loss)  # type: ignore[no-any-return]

    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.load_state_dict(fresh_scaler)
        seen = []
        for _ in range(4):
            optimizer.zero_grad(set_to_none=True)
            loss = step()
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            seen += [one.nan_to_num(7) for one in (*snapshot(model, loss), torch.tensor(scales[-1]))]
        model.zero_grad(set_to_none=True)  # where they overflow, no number equals itself
        return seen

    case = Case(lambda: (copy.deepcopy(initial), loss_of))
    problem = Problem.of(case.profile())
    plan = plan_with(case.profile(), assemble(problem, all_that_may_be(problem), {}))
    assert either_way(case, plan, use).last_step.replayed_values > 4
    assert len(set(scales)) > 1 or dtype is torch.bfloat16  # a step overflowed and was skipped
