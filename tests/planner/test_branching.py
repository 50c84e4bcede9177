"""Branching: its bound is below every plan at every moment, and its basins are ways to decide the largest values."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import numpy as np
import pytest

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.planner.search.allowance import EVALUATIONS_PER_SOLVE, Allowance
from poochplan.planner.search.bound import (
    LARGE_SHARE,
    MOST_BRANCHED,
    PINNED,
    Branching,
    BranchNode,
    Proof,
    Relaxation,
    Relaxed,
    values_to_branch_on,
)
from poochplan.planner.search.solvers import SolverLimits
from poochplan.planner.search.walking import all_decisions
from poochplan.planner.simulator.evaluator import DECISIONS, RECOMPUTE
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable
from tests.depth import tries
from tests.planner.oracle import best_schedule
from tests.planner.oracle_search import Freedom
from tests.planner.plans import budget_at
from tests.planner.random_profiles import random_profile, resnet_like, transformer_like, unet_like
from tests.planner.tiny_profiles import tiny_instance

SEEDS = range(900, 900 + tries(12, 200))
ABOVE = 1 + 1e-9
"""What rounding may put a bound above the optimum by."""


def plenty() -> Allowance:
    return Allowance(evaluations=10_000)


def optimum_s(problem: Problem, budget_bytes: int, freedom: Freedom | None = None) -> float:
    found = best_schedule(problem, budget_bytes, freedom=freedom)
    return inf if found is None else found.step_s


def started(problem: Problem, budget_bytes: int) -> Branching:
    made = Branching(Relaxation(problem, budget_bytes), values_to_branch_on(problem, movable(problem)))
    made.begin(plenty())
    return made


def take_all(made: Branching) -> list[float]:
    """Branches until there is nothing to do; the bound after each step."""
    bounds = [made.bound_s]
    while made.step(plenty(), inf):
        bounds.append(made.bound_s)
        assert len(bounds) < 3 ** (MOST_BRANCHED + 1)
    return [*bounds, made.bound_s]


def open_nodes(made: Branching) -> list[BranchNode]:
    return [*(node for _, _, node in made._open), *made._leaves]


# -- the bound --------------------------------------------------------------------------------------------------------


def test_it_ends_and_the_bound_never_falls_and_is_above_that_of_the_relaxation_but_not_above_the_optimum() -> None:
    more = 0
    for seed in SEEDS:
        _, problem, budget_bytes = tiny_instance(seed)
        made = started(problem, budget_bytes)
        bounds = take_all(made)
        assert bounds == sorted(bounds)
        assert problem.keep_all_s <= bounds[0]
        assert bounds[-1] <= optimum_s(problem, budget_bytes) * ABOVE
        more += bounds[-1] > bounds[0] * ABOVE
        assert made.solved <= (3 ** (len(made.large) + 1) - 1) // 2
        assert not made.step(plenty(), inf) or not made._open
    assert more > 0


@pytest.mark.parametrize("seed", SEEDS[: tries(5, 60)])
def test_a_node_is_below_the_best_plan_that_decides_as_it_does(seed: int) -> None:
    """For each way to decide all that branching decides, some node that is left stands for it."""
    _, problem, budget_bytes = tiny_instance(seed)
    made = started(problem, budget_bytes)
    take_all(made)
    best_s = {}
    for freedom in every_way(problem):
        assert freedom.decisions is not None
        best_s[freedom.decisions] = optimum_s(problem, budget_bytes, freedom)
    nodes = open_nodes(made)
    least_s = min(best_s.values())
    assert least_s < inf
    assert min(node.bound_s for node in nodes) <= least_s * ABOVE
    for node in nodes:
        inside = [step_s for decisions, step_s in best_s.items() if is_inside(node.fixed, decisions)]
        assert node.bound_s <= min(inside, default=inf) * ABOVE
    for decisions, step_s in best_s.items():
        assert step_s == inf or step_s > least_s or any(is_inside(node.fixed, decisions) for node in nodes)


def every_way(problem: Problem) -> list[Freedom]:
    ways = all_decisions(problem, 3**6)
    assert ways is not None
    return [Freedom(decisions=way) for way in ways]


def is_inside(fixed: Mapping[int, Decision], decisions: tuple[Decision, ...]) -> bool:
    return all(decisions[value] is decision for value, decision in fixed.items())


@pytest.mark.parametrize("seed", SEEDS)
def test_beside_a_plan_the_proof_is_never_above_the_optimum(seed: int) -> None:
    """Whatever plan was found so far, be it the best one or a bad one."""
    _, problem, budget_bytes = tiny_instance(seed)
    best_s = optimum_s(problem, budget_bytes)
    for found_s in (best_s, best_s * 1.001, best_s * 1.5, inf):
        proof = Proof(problem, budget_bytes, "highs")
        proof.begin(plenty())
        before_s = proof.bound_s
        for solves in (1, 2, 7, 100):
            proof.branch(plenty(), solves, found_s)
            assert before_s <= proof.bound_s <= best_s * ABOVE
            before_s = proof.bound_s


# -- basins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "profile", [unet_like(3), resnet_like(3), transformer_like(2)], ids=["unet", "resnet", "transformer"]
)
def test_basins_decide_the_largest_values_each_in_another_way(profile: Profile) -> None:
    problem = Problem.of(profile)
    proof = Proof(problem, budget_at(profile, 0.1), "highs")
    proof.begin(plenty())
    basins = proof.branch(plenty(), 40, inf)
    pinned = values_to_branch_on(problem, movable(problem))[:PINNED]
    assert len(basins) > 1
    assert len({tuple(basin.values()) for basin in basins}) == len(basins)
    for basin in basins:
        assert tuple(basin) == pinned
        for value, code in basin.items():
            assert code != RECOMPUTE or problem.replay.replays[value] is not None


def test_values_to_branch_on_are_the_few_largest_that_may_move() -> None:
    for seed in range(30):
        problem = Problem.of(random_profile(seed, 40))
        free = movable(problem)
        large = values_to_branch_on(problem, free)
        sizes = [int(problem.rounded_bytes[value]) for value in large]
        least = LARGE_SHARE * float(problem.rounded_bytes.sum())
        assert set(large) <= set(free)
        assert len(large) <= MOST_BRANCHED
        assert sizes == sorted(sizes, reverse=True)
        left = [int(problem.rounded_bytes[value]) for value in free if value not in large]
        assert all(size < least or (len(large) == MOST_BRANCHED and size <= sizes[-1]) for size in left)
        assert all(size >= least for size in sizes)


# -- children ---------------------------------------------------------------------------------------------------------


def test_children_without_a_plan_are_dropped_and_the_least_node_is_branched_on_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem.of(unet_like(2))
    made = started(problem, budget_at(unet_like(2), 0.5))
    shares = np.full((3, problem.value_count), 1 / 3)
    bounds, asked = iter([inf, 3.0, 2.0, 4.0, 5.0, inf]), list[Mapping[int, Decision]]()

    def solve(fixed: Mapping[int, Decision], limits: SolverLimits) -> Relaxed:
        asked.append(fixed)
        return Relaxed(next(bounds), shares)

    monkeypatch.setattr(made.relaxation, "solve", solve)
    made.bound_s, made._open = 1.0, [(1.0, 0, BranchNode(1.0, {}, shares))]
    assert made.step(plenty(), 1.5)
    assert made.bound_s == 2.0
    assert not made.step(plenty(), 2.0), "a node that is no better than the plan found is not looked into"
    assert made.step(plenty(), inf)
    least = asked[2]
    assert all(fixed.items() > least.items() for fixed in asked[3:])
    assert (made.bound_s, len(asked)) == (3.0, 6)
    assert [node.bound_s for node in sorted(open_nodes(made), key=lambda node: node.bound_s)] == [3.0, 4.0, 5.0]
    assert made.basins()


def test_a_child_whose_program_was_not_solved_in_time_is_as_good_as_its_parent_and_decides_as_it_is_fixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = started(Problem.of(unet_like(2)), budget_at(unet_like(2), 0.5))
    monkeypatch.setattr(made.relaxation, "solve", lambda fixed, limits: Relaxed(0.0, None))
    made.large, root_s = made.large[:2], made.bound_s
    take_all(made)
    for node in open_nodes(made):
        assert node.bound_s == root_s
        assert all(DECISIONS[node.code_of(value)] is decision for value, decision in node.fixed.items())


# -- the end ----------------------------------------------------------------------------------------------------------


def begun(monkeypatch: pytest.MonkeyPatch) -> tuple[Proof, list[Mapping[int, Decision]]]:
    """A proof whose root is solved, and the decisions of each program that it solves from then on."""
    profile = transformer_like(2)
    proof = Proof(Problem.of(profile), int(profile.in_core_peak_bytes * 0.6), "highs")
    proof.begin(plenty())
    solved: list[Mapping[int, Decision]] = []
    solve = Relaxation.solve

    def told(self: Relaxation, fixed: Mapping[int, Decision], limits: SolverLimits) -> Relaxed:
        solved.append(fixed)
        return solve(self, fixed, limits)

    monkeypatch.setattr(Relaxation, "solve", told)
    return proof, solved


def test_a_spent_allowance_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    proof, solved = begun(monkeypatch)
    before_s, stopped = proof.bound_s, plenty()
    part = stopped.part(0.5)
    stopped.stop()
    for spent in (Allowance(0.0), Allowance(evaluations=0), stopped, part, part.part(0.5)):
        assert proof.branch(spent, 60, inf)  # the root is a place
        assert solved == []
        assert proof.bound_s == before_s


@pytest.mark.parametrize(
    ("evaluations", "asked", "most"),
    [(3 * EVALUATIONS_PER_SOLVE, 60, 3 * len(DECISIONS)), (10_000, 10, 10 + len(DECISIONS) - 1)],
)
def test_programs_are_paid_for_and_about_as_many_as_it_was_told(
    evaluations: int, asked: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof, solved = begun(monkeypatch)
    proof.branch(Allowance(evaluations=evaluations), asked, inf)
    assert 0 < len(solved) <= most


def test_a_proof_that_was_ended_solves_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    proof, solved = begun(monkeypatch)
    before_s = proof.bound_s
    proof.end()
    proof.branch(plenty(), 60, inf)
    proof.integral(plenty(), is_whole=False)
    assert solved == []
    assert proof.bound_s == before_s
