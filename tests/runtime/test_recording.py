"""Recording is on in the planned windows alone: the recorder is handed the ops of those and no other call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Phase, PointKind, Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.problem.problem import Problem, build_problem
from poochplan.planner.schedule.schedule import Schedule, assemble, fit
from poochplan.runtime.replays.recorder import Recorder
from poochplan.tensors.operators import traits
from tests.depth import seeds
from tests.planner.plans import plan_with, random_decisions
from tests.runtime.nets import CASES, Case, train

STEPS = 2


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all calls that the dispatcher hands to the recorder, in order; without views."""
    names: list[str] = []
    original = Recorder.__torch_dispatch__

    def listening(self: Recorder, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not traits(func).pure_view:
            names.append(str(func))
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", listening)
    return names


def planned_windows(profile: Profile, plan: Plan) -> list[str]:
    """The ops that the plan says are recorded in a step, by the switches at its save points."""
    switches = {actions.index: actions.record for actions in plan.schedule if actions.at == "save"}
    last = len(plan.values) - 1
    saves = [point.op for point in profile.points if point.kind is PointKind.SAVE]
    is_on, names = plan.record_from_start, []
    for number, op in enumerate(profile.ops):
        for index, at in enumerate(saves):
            if at == number:
                is_on = (is_on or switches.get(index) == "on") and switches.get(index) != "off" and index != last
        if is_on and op.phase is Phase.FORWARD:
            names.append(op.name)
    return names


def one_late_value(problem: Problem) -> Schedule:
    """Everything kept but the last value that can be recomputed."""
    able = [v for v, replay in enumerate(problem.replay.replays) if replay is not None and not problem.must_keep[v]]
    decisions = [Decision.KEEP] * problem.value_count
    decisions[able[-1]] = Decision.RECOMPUTE
    return assemble(problem, decisions, {})


@pytest.mark.parametrize("name", CASES)
def test_a_plan_without_replays_hands_nothing_to_the_recorder(name: str, handed: list[str]) -> None:
    case = CASES[name]
    profile = case.profile()
    problem = build_problem(profile)
    swapped = [Decision.KEEP if reason else Decision.SWAP for reason in problem.must_keep]
    for decisions in ([Decision.KEEP] * problem.value_count, swapped):
        plan = plan_with(profile, fit(problem, decisions, smallest_budget(profile)))
        handed.clear()
        train(case, STEPS, plan)
        assert handed == []


@pytest.mark.parametrize("name", CASES)
def test_the_recorder_is_handed_the_ops_of_the_planned_windows(name: str, handed: list[str]) -> None:
    case = CASES[name]
    profile = case.profile()
    problem = build_problem(profile)
    schedules = [one_late_value(problem)]
    schedules += [fit(problem, random_decisions(problem, seed), profile.in_core_peak_bytes) for seed in seeds(day=2)]
    for schedule in schedules:
        plan = plan_with(profile, schedule)
        windows = planned_windows(profile, plan)
        handed.clear()
        train(case, STEPS, plan)
        assert handed == windows * STEPS
    forward = [op for op in profile.ops if op.phase is Phase.FORWARD]
    assert 0 < len(planned_windows(profile, plan_with(profile, schedules[0]))) < len(forward) / 2


def test_backward_and_optimizer_are_not_recorded_when_a_step_recomputes_everything(handed: list[str]) -> None:
    case: Case = CASES["residual"]
    profile = case.profile()
    problem = build_problem(profile)
    decisions = [
        Decision.RECOMPUTE if replay is not None and not problem.must_keep[value] else Decision.KEEP
        for value, replay in enumerate(problem.replay.replays)
    ]
    plan = plan_with(profile, assemble(problem, decisions, {}))
    model, step, optimizer = case.fresh()
    with poochplan.apply(plan, model):
        loss = step()
        in_forward = len(handed)
        loss.backward()
        optimizer.step()
        (torch.ones(3) * 2).sum()
        assert in_forward > 0
        assert len(handed) == in_forward
