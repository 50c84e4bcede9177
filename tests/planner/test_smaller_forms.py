"""Sources and bits, which a plan may hold in place of saved values, in random steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from poochplan.formats.narrow import with_bits
from poochplan.formats.profile import Profile
from poochplan.formats.sources import with_sources
from poochplan.planner.planning import plan
from poochplan.planner.search.bound import integral_bound, lower_bound
from poochplan.planner.search.solvers import SolverLimits
from poochplan.planner.simulator.evaluator import STYLE_OF, Evaluator
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.simulate import simulate, swap_all_on_demand, try_style
from tests.depth import seeds, tries
from tests.planner.cast_profiles import cast_profile, tiny_cast_profile
from tests.planner.checker import check
from tests.planner.form_profiles import form_profile, tiny_form_profile
from tests.planner.mask_profiles import bool_profile, mask_profile, tiny_bool_profile, tiny_mask_profile
from tests.planner.oracle import best_schedule
from tests.planner.plans import plan_with, random_decisions
from tests.planner.random_profiles import with_random_thread
from tests.planner.random_schedules import random_schedule
from tests.planner.tiny_profiles import tiny_budget

SAME = 1 + 1e-9
FAR = 1e-3
"""Share of the step by which a plan may be longer than the best: in 150 tiny steps one was, by 3.5e-4."""


class Form(NamedTuple):
    """Random steps of some blocks, tiny ones, what adds the smaller form to a profile, and bytes of such a step."""

    profile: Callable[[int, int], Profile]
    tiny: Callable[[int], Profile]
    added: Callable[[Profile], Profile]
    size_bytes: int


FORMS = {
    "sources": Form(cast_profile, tiny_cast_profile, with_sources, 40_000),
    "bits": Form(mask_profile, tiny_mask_profile, with_bits, 400_000),
    "bits of bools on CUDA": Form(bool_profile, tiny_bool_profile, with_bits, 1_600_000),
    "integers and upper halves": Form(form_profile, tiny_form_profile, with_bits, 1_600_000),
}
of_each = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@of_each
@pytest.mark.parametrize("seed", seeds(12, 400))
def test_both_simulators_and_the_checker_agree(form: Form, seed: int) -> None:
    profile = form.profile(seed, 2 + seed % 6)
    thread = with_random_thread(profile, seed) if seed % 2 else profile
    planned = form.added(thread)
    problem, evaluator = build_problem(planned), Evaluator(build_problem(planned))
    for turn, style in enumerate(STYLE_OF):
        wish = random_decisions(problem, 10 * seed + turn)
        budget_bytes = int(profile.in_core_peak_bytes * (0.3 + 0.2 * turn))
        found = try_style(problem, "random", wish, budget_bytes, style)
        compiled = evaluator.evaluate(wish, budget_bytes, style)
        assert (compiled.step_s, compiled.peak_bytes) == (found.simulation.step_s, found.peak_bytes)
        assert evaluator.decisions == found.schedule.decisions
        verdict = check(thread, plan_with(planned, found.schedule))
        assert verdict.peak_bytes == found.simulation.peak_bytes
        assert verdict.first_step_peak_bytes == found.simulation.first_step_peak_bytes


@of_each
@pytest.mark.parametrize("seed", seeds(25, 2000))
def test_no_plan_is_faster_than_the_bound_for_its_own_peak(form: Form, seed: int) -> None:
    problem = build_problem(form.added(form.profile(seed, 1 + seed % 7)))
    wish = random_decisions(problem, seed)
    for schedule in (
        random_schedule(problem, seed),
        try_style(problem, "", wish, int(random.Random(seed).random() * form.size_bytes), STYLE_OF[0]).schedule,
    ):
        found = simulate(problem, schedule)
        peak_bytes = max(found.peak_bytes, found.first_step_peak_bytes)
        assert lower_bound(problem, peak_bytes, "highs", SolverLimits(60)) <= found.step_s * SAME


@of_each
@pytest.mark.parametrize("seed", seeds(4, 200))
def test_the_planner_finds_the_best_plan_of_a_tiny_step(form: Form, seed: int) -> None:
    profile = form.tiny(seed)
    problem, budget_bytes = build_problem(form.added(profile)), tiny_budget(profile, seed)
    if swap_all_on_demand(problem).peak_bytes > budget_bytes:
        problem = build_problem(profile)  # narrowing takes memory itself
    best = best_schedule(problem, budget_bytes)
    assert best is not None
    made = plan(profile, budget_bytes, time_limit_s=5, gap=0.0)
    assert check(profile, made).peak_bytes == made.prediction.peak_bytes <= budget_bytes
    assert best.step_s / SAME <= made.prediction.step_s <= best.step_s * (1 + FAR)
    assert made.solve.bound_s is not None
    assert made.solve.bound_s <= best.step_s * SAME
    for is_whole in (False, True):
        found_s = integral_bound(problem, budget_bytes, "highs", SolverLimits(tries(5, 60)), is_whole=is_whole)
        assert found_s <= best.step_s * SAME
