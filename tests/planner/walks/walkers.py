"""Walks for tests: problems, walkers at their begin, and walks taken one step at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from poochplan.formats.occupancy import Codes
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.annealing import (
    DRAWS,
    EvaluatedPlan,
    Incumbents,
    Limits,
    Scored,
    SearchSpace,
    Walker,
    scored,
    search_space_of,
    step,
)
from poochplan.planner.simulator.evaluator import KEEP, RECOMPUTE, SWAP, Evaluator, codes_of
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable, swap_all, swap_all_on_demand
from tests.planner.plans import problems_of
from tests.planner.random_profiles import random_profile, with_random_thread

STEPS = 400
WARMTH = 0.01
HIGHEST_DRAW = float(np.nextafter(1.0, 0.0))
KINDS = {"exchange": 0.1, "few": 0.4, "role": 0.7, "window": 0.8, "layer": 0.9, "take over": 0.96, "style": 0.99}
"""A first draw of a step, by the change that it leads to."""


def any_profile(seed: int) -> Profile:
    """Of up to 60 ops, two in three with a launching thread."""
    profile = random_profile(seed, 5 + 7 * seed % 55)
    return with_random_thread(profile, seed) if seed % 3 else profile


def random_problems(count: int) -> Iterator[tuple[int, Problem]]:
    return ((seed, problem) for seed, _, problem in problems_of(any_profile, count))


def tight(problem: Problem, share: float = 0.3) -> int:
    """Between the smallest budget and what keeping everything takes."""
    smallest = swap_all_on_demand(problem).peak_bytes
    return smallest + int(share * max(0, int(problem.base_bytes.max() + problem.rounded_bytes.sum()) - smallest))


def walker_for(problem: Problem, host_bytes: int | None = None, values: Sequence[int] | None = None) -> Walker:
    found = Incumbents(problem, tight(problem), host_bytes)
    return Walker(movable(problem) if values is None else values, found)


def anneal(
    walker: Walker, begin: EvaluatedPlan, evaluations: int = STEPS, seed: int = 0, **options: Sequence[int]
) -> EvaluatedPlan:
    return walker.anneal(
        begin, Allowance(evaluations=evaluations), temperature=WARMTH, seed=seed, pinned=options.get("pinned", ())
    )


def begin_at(walker: Walker, wish: Sequence[Decision] | None = None) -> EvaluatedPlan:
    return walker.try_styles(codes_of(swap_all(walker.problem) if wish is None else wish), "here")


@dataclass
class Steps:
    """State: a walk that is taken one step at a time; where it is infinitely hot, to whatever it tries."""

    problem: Problem
    values: Sequence[int]
    temperature: float = WARMTH
    mate: Codes | None = None
    here: Scored = field(init=False)
    space: SearchSpace = field(init=False)

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.problem)
        self.limits = Limits(tight(self.problem), -1)
        self.space = search_space_of(self.problem, self.values)
        self.begin_at(codes_of(swap_all(self.problem)))

    def begin_at(self, codes: Codes) -> None:
        self.here = scored(self.evaluator, self.limits, 0, codes.tobytes())

    def take(self, draws: Sequence[float]) -> tuple[Codes, Codes]:
        """Where the walk was before the step, and where it is behind it."""
        before = self.codes
        mate = self.here.codes if self.mate is None else self.mate.tobytes()
        self.here = step(self.evaluator, self.space, self.limits, self.here, mate, self.temperature, draws)
        return before, self.codes

    @property
    def codes(self) -> Codes:
        return np.frombuffer(self.here.codes, dtype=np.int8)


def draws_of(kind: float, rng: random.Random) -> list[float]:
    return [kind, *(rng.random() for _ in range(DRAWS - 2)), 0.0]


def assert_possible(problem: Problem, wish: Codes) -> None:
    """Each value has a decision that it can have."""
    for value, code in enumerate(wish.tolist()):
        assert code in (KEEP, SWAP, RECOMPUTE)
        assert code == KEEP or not problem.must_keep[value]
        assert code != RECOMPUTE or problem.replay.replays[value] is not None
