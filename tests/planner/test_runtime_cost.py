"""What the runtime itself takes is part of what a plan promises, and of nothing that is decided."""

from __future__ import annotations

import msgspec
import pytest

from poochplan.formats.plan import Decision, PointActions
from poochplan.formats.profile import Profile, RuntimeCost
from poochplan.planner.judge.host_time import recorded_ops, runtime_seconds
from poochplan.planner.planning import plan
from poochplan.planner.problem.problem import build_problem
from poochplan.planner.schedule.schedule import Schedule, keep_all
from poochplan.planner.whatif import for_machine
from tests.planner.random_profiles import resnet_like, transformer_like

COST = RuntimeCost(handle_s=1e-3, swap_s=1e-1, record_s=1e1)


def costed(profile: Profile) -> Profile:
    return msgspec.structs.replace(profile, runtime=COST)


def test_handles_swapped_values_and_recorded_ops_are_paid_for_each() -> None:
    profile = costed(resnet_like())
    problem = build_problem(profile)
    assert runtime_seconds(profile, problem, keep_all(problem)) == pytest.approx(1e-3 * len(profile.handles))
    decisions = (Decision.SWAP,) * 2 + (Decision.KEEP,) * (problem.value_count - 2)
    schedule = Schedule(decisions, (), record_from_start=True)
    forward = sum(op.phase == "forward" for op in profile.ops)
    assert runtime_seconds(profile, problem, schedule) == pytest.approx(
        1e-3 * len(profile.handles) + 0.2 + 10 * forward
    )


def test_only_what_lies_in_a_recording_window_is_recorded() -> None:
    profile = resnet_like()
    problem = build_problem(profile)
    at = [profile.points[point].op for point in problem.save_points]

    def ops(switches: dict[int, str], from_start: bool = False) -> int:
        actions = tuple(PointActions(at="save", index=i, record=what) for i, what in switches.items())  # type: ignore[arg-type]
        return recorded_ops(profile, problem, Schedule(keep_all(problem).decisions, actions, from_start))

    forward = sum(op.phase == "forward" for op in profile.ops)
    assert ops({}) == 0
    assert ops({}, from_start=True) == forward
    assert ops({1: "on", 3: "off"}) == at[3] - at[1]
    assert ops({2: "off"}, from_start=True) == at[2]
    assert ops({1: "on", 2: "off", 4: "on"}) == at[2] - at[1] + forward - at[4]


def test_a_plan_says_it_beside_the_simulated_step_and_decides_as_without() -> None:
    profile = transformer_like()
    plain, with_cost = (plan(one, "60%", threads=1, time_limit_s=5) for one in (profile, costed(profile)))
    assert plain.prediction.runtime_s == 0
    assert plain.prediction.expected_step_s == plain.prediction.step_s
    promised = with_cost.prediction
    assert promised.runtime_s > 0
    assert promised.expected_step_s == promised.step_s + promised.runtime_s
    assert promised.expected_overhead == pytest.approx(promised.expected_step_s / promised.in_core_step_s - 1)
    assert with_cost.values == plain.values
    assert promised.step_s == plain.prediction.step_s


def test_of_a_device_that_was_not_measured_it_is_not_known() -> None:
    assert for_machine(costed(resnet_like()), compute_scale=0.5).runtime is None
