"""What a sweep promises: every cell, in order, whatever happens to some of them; and a comparison: the same referee."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from dataclasses import replace

import msgspec
import pytest

from poochplan.errors import UsageError
from poochplan.formats.plan import SolveStatus
from poochplan.formats.profile import Memory, Profile
from poochplan.planner import sweep as sweeping
from poochplan.planner.planning import ILP, plan, smallest_budget
from poochplan.planner.policies import PolicyInput, policy_names, run_policy
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.sweep import Solving, SweepPoint, all_policies, compare_policies, default_budgets, sweep
from tests.depth import tries
from tests.planner.random_profiles import resnet_like, transformer_like, unet_like

FAST = ("swap-all", "recompute-all", "keep-all")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return transformer_like(2, link_gb_per_s=0.5)


def without_time(points: list[SweepPoint]) -> list[SweepPoint]:
    return [replace(point, wall_s=0.0) for point in points]


def test_the_default_budgets_go_from_the_smallest_to_the_in_core_peak(profile: Profile) -> None:
    budgets = default_budgets(profile, 5)
    assert len(budgets) == 5
    assert (budgets[0], budgets[-1]) == (smallest_budget(profile), profile.in_core_peak_bytes)
    assert list(budgets) == sorted(budgets)
    most = (budgets[1] + budgets[2]) // 2
    assert default_budgets(profile, 3, most)[-1] == most


def test_every_policy_at_every_budget_in_order_each_as_when_planned_alone(profile: Profile) -> None:
    budgets = default_budgets(profile, 3)[1:]  # the search ends by itself there, not by the clock
    points = sweep(profile, budgets, processes=1)
    assert [(point.policy, point.budget_bytes) for point in points] == [
        (policy, budget) for policy in all_policies() for budget in budgets
    ]
    for point in points:
        assert not point.failed, point.outcome
        if point.policy == ILP:
            alone = plan(profile, point.budget_bytes, threads=1).prediction
            assert (point.step_s, point.out_bytes) == (alone.step_s, alone.out_bytes)
        else:
            candidate = run_policy(point.policy, PolicyInput(Problem.of(profile), point.budget_bytes))
            assert point.peak_bytes == candidate.peak_bytes
            assert point.feasible == (candidate.peak_bytes <= point.budget_bytes)
            assert point.step_s == (candidate.simulation.step_s if point.feasible else None)


def test_two_processes_find_what_one_finds(profile: Profile) -> None:
    budgets = default_budgets(profile, 9)[6:]  # the search ends by itself there, not by the clock
    told: list[tuple[int, int]] = []
    names = (*FAST, ILP)
    found = sweep(profile, budgets, names, processes=2, finished=lambda _, done, total: told.append((done, total)))
    assert without_time(found) == without_time(sweep(profile, budgets, names, processes=1))
    assert told == [(done, 12) for done in range(1, 13)]


def test_a_budget_below_the_smallest_is_a_row_with_the_peak_each_came_down_to(profile: Profile) -> None:
    smallest = smallest_budget(profile)
    points = sweep(profile, [smallest - 1], [ILP, "swap-all-on-demand", "keep-all"], processes=1)
    assert [point.feasible for point in points] == [False] * 3
    assert [point.peak_bytes for point in points] == [smallest, smallest, profile.in_core_peak_bytes]
    assert {point.overhead for point in points} == {None}


def test_a_cell_that_fails_loses_no_other(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, given: PolicyInput) -> object:
        if name == "recompute-all":
            raise ArithmeticError("two\nlines")
        return run_policy(name, given)

    monkeypatch.setattr(sweeping, "run_policy", broken)
    budget = profile.in_core_peak_bytes
    points = sweep(profile, [budget, budget], (*FAST, "keep-all"), processes=1)  # each is solved once
    assert [point.failed for point in points] == [False, True, False]
    assert points[1].outcome == "failed: ArithmeticError: two lines"


def test_cells_of_a_process_that_died_are_tried_again(profile: Profile) -> None:
    killed = []

    def kill_one(point: SweepPoint, done: int, total: int) -> None:
        if not killed:
            killed.append(multiprocessing.active_children()[0])
            killed[0].kill()

    points = sweep(profile, default_budgets(profile, 3), FAST, processes=2, finished=kill_one)
    assert killed
    assert not any(point.failed for point in points)
    assert len(points) == 9


def test_an_interrupt_ends_the_processes_and_is_raised_again(profile: Profile) -> None:
    before = set(multiprocessing.active_children())
    seen: list[SweepPoint] = []

    def interrupt(point: SweepPoint, done: int, total: int) -> None:
        seen.append(point)
        workers.extend(child for child in multiprocessing.active_children() if child not in before)
        raise KeyboardInterrupt

    workers: list[multiprocessing.process.BaseProcess] = []
    with pytest.raises(KeyboardInterrupt):
        sweep(profile, default_budgets(profile, 3), FAST, processes=2, finished=interrupt)
    assert len(seen) == 1
    assert workers
    for worker in workers:
        assert multiprocessing.connection.wait([worker.sentinel], timeout=10), "still running"


@pytest.mark.parametrize("status", SolveStatus)
def test_however_a_search_ended_its_plan_is_a_point_that_says_so(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, status: SolveStatus
) -> None:
    made = plan(profile, profile.in_core_peak_bytes)
    facts = {"status": status, "bound_s": 1.25 * made.prediction.in_core_step_s, "gap": 0.01}
    made = msgspec.structs.replace(made, solve=msgspec.structs.replace(made.solve, **facts))
    monkeypatch.setattr(sweeping, "plan", lambda *_, **__: made)
    (point,) = sweep(profile, [profile.in_core_peak_bytes], [ILP], processes=1)
    assert (point.status, point.outcome, point.gap) == (status, str(status), 0.01)
    assert point.bound_overhead == pytest.approx(0.25)
    assert point.feasible
    assert not point.failed


def test_what_cannot_be_swept_is_said_before_anything_is_solved(profile: Profile) -> None:
    with pytest.raises(UsageError, match="policy 'clever' is unknown: expected ilp"):
        sweep(profile, [1], [ILP, "clever"])
    with pytest.raises(UsageError, match="solver 'nonesuch' is unknown"):
        sweep(profile, [1], [ILP], solving=Solving(solver="nonesuch"))


def test_the_ilp_is_never_behind_a_policy_by_more_than_its_gap() -> None:
    profile = resnet_like(3, link_gb_per_s=0.3)
    budgets = default_budgets(profile, 4)
    points = sweep(profile, budgets, processes=2, solving=Solving(time_limit_s=tries(2, 60)))
    for budget in budgets:
        fitting = {p.policy: p.step_s for p in points if p.budget_bytes == budget and p.step_s is not None}
        best = min(fitting.values())
        assert fitting[ILP] <= best * 1.005


def test_no_policy_is_shown_below_the_bound_where_its_steps_have_no_arena(profile: Profile) -> None:
    replace = msgspec.structs.replace
    times = replace(profile.times, unserved_step_s=1.5 * profile.times.step_s)
    slower = replace(profile, times=times, memory=Memory.ALLOCATED, device=replace(profile.device, kind="cpu"))
    points = sweep(slower, [slower.in_core_peak_bytes], [ILP, *FAST], processes=1)
    (ilp,) = [point for point in points if point.policy == ILP]
    assert ilp.bound_overhead is not None
    assert min(point.overhead for point in points if point.overhead is not None) >= ilp.bound_overhead - 1e-9
    rows = compare_policies(slower, plan(slower, slower.in_core_peak_bytes))
    kept_s = {row.policy: row.step_s for row in rows}["keep-all"]
    assert kept_s == Problem.of(slower, has_arena=False).keep_all_s
    assert ilp.step_s is not None
    assert ilp.step_s < kept_s  # by an arena that fits where a little is given up


# -- all policies side by side, at the budget of one plan ------------------------------------------------------------


def test_every_policy_is_compared_and_rows_that_fit_come_first_and_the_fastest_of_them_first() -> None:
    profile = unet_like(3)
    budget = int(0.75 * profile.in_core_peak_bytes)
    rows = compare_policies(profile, plan(profile, budget, evaluations=1000))
    assert sorted(row.policy for row in rows) == sorted(all_policies()) == sorted(("ilp", *policy_names()))
    assert [row.fits for row in rows] == sorted((row.peak_bytes <= budget for row in rows), reverse=True)
    fitting = [row.step_s for row in rows if row.fits]
    assert fitting == sorted(fitting)
    assert rows[0].policy == "ilp"
    assert {"keep-all", "vdnn"} <= {row.policy for row in rows if not row.fits}


def test_the_margin_is_what_the_ilp_gains_and_is_told_of_plans_that_fit() -> None:
    profile = transformer_like(2, link_gb_per_s=0.5)
    budget = int(0.6 * profile.in_core_peak_bytes)
    made = plan(profile, budget, evaluations=1000)
    rows = {row.policy: row for row in compare_policies(profile, made)}
    assert (rows["ilp"].step_s, rows["ilp"].wall_s) == (made.prediction.step_s, made.solve.wall_s)
    assert rows["ilp"].ilp_margin == 0
    assert rows["keep-all"].ilp_margin is None
    margin = rows["swap-all"].ilp_margin
    assert margin is not None
    assert margin == pytest.approx(rows["swap-all"].overhead - rows["ilp"].overhead)
