"""What walks and descents bring back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Kind
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.annealing import (
    FAR_OFF,
    MIN_GAIN,
    SEARCH_STYLES,
    EvaluatedPlan,
    Limits,
    Walker,
    scored,
)
from poochplan.planner.simulator.evaluator import KEEP, RECOMPUTE, SWAP, Evaluator, codes_of, decisions_of
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable, swap_all
from tests.depth import tries
from tests.planner.plans import random_decisions
from tests.planner.random_profiles import Recorder, link, transformer_like

from .walkers import STEPS, anneal, assert_possible, begin_at, random_problems, walker_for

# -- what a walk brings back ------------------------------------------------------------------------------------------


def test_the_best_of_a_walk_is_no_worse_than_its_begin_and_the_simulator_says_the_same_of_it() -> None:
    better = 0
    for seed, problem in random_problems(tries(12, 100)):
        walker = walker_for(problem)
        begin = begin_at(walker, random_decisions(problem, seed))
        annealed = anneal(walker, begin, seed=seed)
        descended = walker.descend(annealed, Allowance(evaluations=STEPS))
        hot = walker.anneal(descended, Allowance(evaluations=64), temperature=1e6, seed=seed)  # takes every change
        assert score_of(walker, hot) <= score_of(walker, descended)
        for found in (begin, annealed, descended, hot, walker.incumbents.best()):
            simulated = walker.incumbents.simulated(found)
            assert simulated.simulation.step_s == found.step_s
            assert simulated.peak_bytes == found.peak_bytes
            assert simulated.simulation.out_bytes + simulated.simulation.in_bytes == found.moved_bytes
            assert simulated.schedule.decisions == decisions_of(found.decisions)
            assert_possible(problem, found.wish)
        assert score_of(walker, annealed) <= score_of(walker, begin)
        better += score_of(walker, annealed) < score_of(walker, begin)
    assert better > 0


def score_of(walker: Walker, found: EvaluatedPlan) -> float:
    given = walker.incumbents
    limits = Limits(given.budget_bytes, given.host_bytes)
    return scored(Evaluator(walker.problem), limits, found.style, found.wish.tobytes()).score


def test_a_walk_offers_the_best_that_it_meets() -> None:
    problem = Problem.of(transformer_like(3))
    walker = walker_for(problem)
    found = anneal(walker, begin_at(walker), 2000)
    if found.peak_bytes <= walker.incumbents.budget_bytes:
        assert walker.incumbents.step_s <= found.step_s
    assert any((each.wish == found.wish).all() for each in walker.incumbents.ranked())


def test_what_is_offered_fits_the_host() -> None:
    limited = 0
    for seed, problem in random_problems(tries(12, 100)):
        host_bytes = int(problem.size_bytes.sum()) // 4
        walker = walker_for(problem, host_bytes=host_bytes)
        begin = begin_at(walker)
        walker.descend(anneal(walker, begin, seed=seed), Allowance(evaluations=STEPS))
        for found in walker.incumbents.ranked():
            swapped = [v for v, d in enumerate(found.decisions.tolist()) if d == SWAP]
            assert sum(int(problem.size_bytes[value]) for value in swapped) <= host_bytes
            assert walker.incumbents.fits(codes_of(walker.incumbents.simulated(found).schedule.decisions))
        began = sum(int(problem.size_bytes[v]) for v, d in enumerate(begin.decisions.tolist()) if d == SWAP)
        limited += began > host_bytes and bool(walker.incumbents.ranked())
    assert limited > 0


# -- descent ----------------------------------------------------------------------------------------------------------


def test_a_descent_ends_where_no_single_change_gains() -> None:
    moved = 0
    for seed, problem in random_problems(tries(12, 100)):
        walker = walker_for(problem, host_bytes=None if seed % 2 else int(problem.size_bytes.sum()) // 3)
        begin = begin_at(walker, random_decisions(problem, seed))
        end = walker.descend(begin, Allowance(evaluations=100_000))
        best = score_of(walker, end)
        assert best <= score_of(walker, begin)
        moved += best < score_of(walker, begin)
        for value in walker.values:
            for code in (KEEP, SWAP, RECOMPUTE):
                if code == end.wish[value] or (code == RECOMPUTE and problem.replay.replays[value] is None):
                    continue
                wish = end.wish.copy()
                wish[value] = code
                for style in range(SEARCH_STYLES):
                    changed = score_of(walker, replace(end, wish=wish, style=style))
                    assert changed >= best - MIN_GAIN
                    if changed > best + FAR_OFF:  # not looked at in another style
                        break
    assert moved > 0


def test_a_descent_changes_only_the_values_it_was_given() -> None:
    for seed, problem in random_problems(tries(8, 40)):
        values = movable(problem)[::2]
        walker = walker_for(problem, values=values)
        begin = begin_at(walker, random_decisions(problem, seed))
        end = walker.descend(begin, Allowance(evaluations=10_000))
        assert set(np.flatnonzero(end.wish != begin.wish).tolist()) <= set(values)
        assert_possible(problem, end.wish)


# -- the smallest problems --------------------------------------------------------------------------------------------


def one_value() -> Problem:
    r = Recorder()
    (x,) = r.op("make", [r.before(512, Kind.INPUT)], [1 << 20])
    r.op("use", [x], [512], saves=[x], workspace_bytes=4 << 20)
    return Problem.of(r.finish(link()))


def test_a_walk_over_one_value_finds_its_best_decision() -> None:
    problem = one_value()
    assert len(movable(problem)) == 1
    walker = walker_for(problem)
    begin = begin_at(walker)
    for found in (anneal(walker, begin), walker.descend(begin, Allowance(evaluations=100))):
        wishes = [swap_all(problem), *([d] * problem.value_count for d in Decision)]
        possible = [wish for wish in wishes if is_possible(problem, wish)]
        best = min(score_of(walker, begin_at(walker, wish)) for wish in possible)
        assert score_of(walker, found) <= best + MIN_GAIN


def is_possible(problem: Problem, wish: Sequence[Decision]) -> bool:
    try:
        assert_possible(problem, codes_of(wish))
    except AssertionError:
        return False
    return True


def test_a_walk_over_no_value_or_with_every_value_pinned_stays_where_it_is() -> None:
    problem = one_value()
    walker = walker_for(problem, values=())
    begin = begin_at(walker)
    assert anneal(walker, begin) is begin
    assert (walker.descend(begin, Allowance(evaluations=100)).wish == begin.wish).all()
    assert anneal(walker_for(problem), begin, pinned=movable(problem)) is begin
