"""Incumbents: of all that several threads offer, the best plans are remembered."""

from __future__ import annotations

import random
import threading
from math import inf

import numpy as np
import pytest

from poochplan.planner.arena import step_layout
from poochplan.planner.arena.step_layout import Fitting
from poochplan.planner.search import annealing
from poochplan.planner.search.annealing import EvaluatedPlan, Incumbents
from poochplan.planner.simulator.evaluator import STYLE_OF, codes_of
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import swap_all_on_demand
from tests.planner.random_profiles import transformer_like, unet_like


def found_with(problem: Problem, number: int, step_s: float, peak_bytes: int = 0) -> EvaluatedPlan:
    wish = np.array([number // 3**value % 3 for value in range(problem.value_count)], dtype=np.int8)
    nothing = np.zeros(problem.value_count, dtype=np.int8)
    return EvaluatedPlan(wish, nothing, 0, step_s, peak_bytes, 0, "ilp", 100)


@pytest.mark.parametrize("kept", [500, 20])
def test_of_what_several_threads_offer_the_best_is_kept(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annealing, "KEPT", kept)
    problem = Problem.of(transformer_like(2))
    found = Incumbents(problem, 100, None)
    rng = random.Random(0)
    plans = [
        found_with(problem, number, problem.step_s * (1 + number * 1e-3), peak_bytes=rng.choice((50, 50, 100, 101)))
        for number in range(400)
    ]
    fitting = [plan for plan in plans if plan.peak_bytes <= 100]
    best_s = min(plan.step_s for plan in fitting)
    rng.shuffle(plans)
    seen: list[list[float]] = [[] for _ in range(4)]

    def offer(which: int) -> None:
        for plan in plans[which::4]:
            found.offer(plan)
            seen[which].append(found.step_s)
            assert found.best().step_s >= best_s

    threads = [threading.Thread(target=offer, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.step_s == found.best().step_s == best_s
    assert all(steps == sorted(steps, reverse=True) for steps in seen)
    ranked = found.ranked()
    assert len(ranked) <= 2 * kept
    expected = sorted(plan.step_s for plan in fitting)[: min(kept, len(fitting))]
    assert [plan.step_s for plan in ranked if plan.peak_bytes <= 100][: len(expected)] == expected


def test_a_plan_over_the_budget_is_best_only_until_one_fits() -> None:
    problem = Problem.of(unet_like(2))
    found = Incumbents(problem, 100, None)
    found.offer(found_with(problem, 1, 1.0, peak_bytes=102))
    found.offer(found_with(problem, 2, 2.0, peak_bytes=101))
    assert found.step_s == inf
    assert found.best().step_s == 2.0
    found.offer(found_with(problem, 3, 3.0, peak_bytes=100))
    assert found.step_s == found.best().step_s == 3.0


def test_where_no_arena_fits_a_plan_within_the_budget_goes_before_one_a_byte_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_layout, "LOOKS_PER_BLOCK", 0)  # packs badly
    profile = transformer_like(3)
    problem = Problem.of(profile)
    least = swap_all_on_demand(problem)
    budget_bytes = least.peak_bytes
    found = Incumbents(problem, budget_bytes, None, Fitting(problem, budget_bytes))
    codes, step_s = codes_of(least.wish), least.simulation.step_s
    within = found.offer(EvaluatedPlan(codes, codes, len(STYLE_OF) - 1, step_s, budget_bytes, 0, "swap-all", 0))
    found.offer(found_with(problem, 1, step_s / 2, peak_bytes=budget_bytes + 1))
    assert within.needed_bytes > budget_bytes + 1
    assert found.best().peak_bytes == budget_bytes + 1
    assert found.best(is_live=True).peak_bytes == found.simulated(within).peak_bytes == budget_bytes
