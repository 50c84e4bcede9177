"""Branching: its bound is below every plan at every moment, and its basins are ways to decide the largest values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

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
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.simulate import movable
from tests.depth import tries
from tests.planner.oracle import best_schedule
from tests.planner.oracle_search import Freedom
from tests.planner.plans import budget_at
from tests.planner.random_profiles import random_profile, resnet_like, transformer_like, unet_like
from tests.planner.tiny_profiles import tiny_instance
from tests.planner.toys import one_value

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
    problem = build_problem(profile)
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
        problem = build_problem(random_profile(seed, 40))
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


@dataclass
class Scripted:
    """A relaxation that says what it is told to: the bound of decided values, infinite where there is no plan."""

    problem: Problem
    bounds: Mapping[tuple[Decision, ...], float]
    """By the decisions of the values that are fixed, in the order of their fixing."""
    is_unsolved: bool = False
    """Whether no solution comes with any bound but the first."""
    asked: list[tuple[Decision, ...]] = field(default_factory=list)

    def solve(self, fixed: Mapping[int, Decision], limits: SolverLimits) -> Relaxed:
        key = tuple(fixed.values())
        self.asked.append(key)
        bound_s = self.bounds.get(key, 1.0)
        if bound_s == inf or (self.is_unsolved and fixed):
            return Relaxed(bound_s, None)
        shares = np.full((3, self.problem.value_count), [[0.4], [0.3], [0.3]])
        for value, decision in fixed.items():
            for row, each in enumerate(DECISIONS):
                shares[row, value] = float(each is decision)
        return Relaxed(bound_s, shares)


def scripted(bounds: Mapping[tuple[Decision, ...], float], *, is_unsolved: bool = False) -> tuple[Branching, Scripted]:
    problem = build_problem(unet_like(2))
    said = Scripted(problem, bounds, is_unsolved)
    replayable = [v for v in movable(problem) if problem.replay.replays[v] is not None]
    made = Branching(said, tuple(replayable[:2]))  # type: ignore[arg-type]
    made.begin(plenty())
    return made, said


K, S, R = DECISIONS


BY_HAND: dict[str, tuple[Mapping[tuple[Decision, ...], float], list[tuple[float, bool, float, int]], set[Any]]] = {
    "children without a plan are dropped": (
        {(): 1.0, (K,): inf, (S,): 3.0, (R,): inf}, [(inf, True, 3.0, 4)], {(S,)},
    ),
    "the least node is branched on first and the bound is that of all that is left": (
        {(): 1.0, (K,): 5.0, (S,): 2.0, (R,): 4.0, (S, K): 6.0, (S, S): 7.0, (S, R): inf},
        [(inf, True, 2.0, 4), (inf, True, 4.0, 7)], {(K,), (R,), (S, K), (S, S)},
    ),
    "a child is never below its parent": (
        {(): 2.0, (K,): 1.0, (S,): 1.0, (R,): 1.0}, [(inf, True, 2.0, 4)], {(K,), (S,), (R,)},
    ),
    "where no child has a plan it ends and proves no more than before": (
        {(): 1.0, (K,): inf, (S,): inf, (R,): inf}, [(inf, False, 1.0, 4)], set(),
    ),
    "a node that is no better than the plan found is not looked into": (
        {(): 2.0, (K,): 3.0, (S,): 4.0, (R,): 5.0},
        [(2.0, False, 2.0, 1), (3.0, True, 3.0, 4), (3.0, False, 3.0, 4)], {(K,), (S,), (R,)},
    ),
    "a decided node stays in the bound": (
        {(): 1.0, **{(a,): 2.0 for a in DECISIONS}, **{(a, b): 2.5 for a in DECISIONS for b in DECISIONS}},
        [*((inf, True, 2.0, asked) for asked in (4, 7, 10)), *[(inf, True, 2.5, 13)] * 9, (inf, False, 2.5, 13)],
        {(a, b) for a in DECISIONS for b in DECISIONS},
    ),
}  # fmt: skip
"""What the programs say; of each step the time of the plan found, whether there was something to do, the bound behind
it and how many programs were solved by then; and the decisions of the nodes that are left.
"""


@pytest.mark.parametrize("name", BY_HAND)
def test_nodes_are_branched_on_as_worked_out_by_hand(name: str) -> None:
    bounds, steps, left = BY_HAND[name]
    made, said = scripted(bounds)
    for found_s, is_taken, bound_s, asked in steps:
        assert made.step(plenty(), found_s) == is_taken
        assert (made.bound_s, len(said.asked)) == (bound_s, asked)
    assert {tuple(node.fixed.values()) for node in open_nodes(made)} == left
    assert bool(made.basins()) == bool(left)


def test_a_value_without_a_replay_is_not_recomputed() -> None:
    problem = build_problem(one_value(1, opaque=True))
    said = Scripted(problem, {})
    made = Branching(said, (0,))  # type: ignore[arg-type]
    made.begin(plenty())
    made.step(plenty(), inf)
    assert said.asked == [(), (K,), (S,)]


def test_a_child_whose_program_was_not_solved_in_time_is_as_good_as_its_parent_and_decides_as_it_is_fixed() -> None:
    made, _ = scripted({(): 1.0}, is_unsolved=True)
    take_all(made)
    for node in open_nodes(made):
        assert node.bound_s == 1.0
        assert all(DECISIONS[node.code_of(value)] is decision for value, decision in node.fixed.items())


# -- the end ----------------------------------------------------------------------------------------------------------


def begun(monkeypatch: pytest.MonkeyPatch) -> tuple[Proof, list[Mapping[int, Decision]]]:
    """A proof whose root is solved, and the decisions of each program that it solves from then on."""
    profile = transformer_like(2)
    proof = Proof(build_problem(profile), int(profile.in_core_peak_bytes * 0.6), "highs")
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
