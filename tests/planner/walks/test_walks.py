"""One walk: where it may go."""

from __future__ import annotations

import random
import re
from math import inf

import numpy as np
import pytest

from poochplan.formats.profile import Profile
from poochplan.planner.search.annealing import DRAWS, STYLES, search_space_of
from poochplan.planner.simulator.evaluator import codes_of
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable
from tests.depth import tries
from tests.planner.plans import random_decisions
from tests.planner.random_profiles import resnet_like, transformer_like, unet_like

from .walkers import (
    HIGHEST_DRAW,
    KINDS,
    Steps,
    anneal,
    assert_possible,
    begin_at,
    draws_of,
    random_problems,
    walker_for,
)

# -- where a walk may go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_change_gives_a_value_a_decision_that_it_cannot_have_or_touches_one_that_is_pinned(kind: float) -> None:
    changed = 0
    for seed, problem in random_problems(tries(12, 120)):
        rng = random.Random(seed)
        free = movable(problem)
        values = sorted(rng.sample(free, (len(free) + 1) // 2))
        if not values:
            continue
        steps = Steps(problem, values, temperature=inf, mate=codes_of(random_decisions(problem, seed)))
        start = steps.codes
        others = [value for value in range(problem.value_count) if value not in values]
        for _ in range(60):
            draws = draws_of(kind if rng.random() < 0.7 else rng.random(), rng)
            if rng.random() < 0.3:
                draws = [kind, *(rng.choice((0.0, HIGHEST_DRAW)) for _ in range(DRAWS - 1))]
            before, tried = steps.take(draws)
            assert_possible(problem, tried)
            assert 0 <= steps.here.style < len(STYLES)
            assert (tried[others] == start[others]).all()
            changed += int((tried != before).sum())
    assert changed > 0


def test_a_walk_leaves_pinned_values_as_they_are() -> None:
    for seed, problem in random_problems(tries(10, 60)):
        rng = random.Random(seed)
        free = movable(problem)
        pinned = rng.sample(free, len(free) // 2)
        walker = walker_for(problem)
        begin = begin_at(walker, random_decisions(problem, seed))
        found = anneal(walker, begin, seed=seed, pinned=pinned)
        assert (found.wish[pinned] == begin.wish[pinned]).all()
        assert_possible(problem, found.wish)


def test_a_change_for_the_worse_is_taken_when_it_is_hot_and_refused_when_it_is_cold() -> None:
    problem = Problem.of(transformer_like(2))
    rng = random.Random(0)
    taken = {}
    for temperature in (1e-12, 1e12):
        steps, worse = Steps(problem, movable(problem), temperature), 0
        for _ in range(200):
            before = steps.here.score
            draws = draws_of(rng.random(), rng)
            steps.take([*draws[:-1], 0.5])
            worse += steps.here.score > before
        taken[temperature] = worse
    assert taken[1e-12] == 0
    assert taken[1e12] > 10


# -- values that belong together --------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [transformer_like(4), resnet_like(8), unet_like(4)], ids=["gpt", "resnet", "unet"])
def test_values_of_one_role_are_alike_and_every_value_has_one_role(profile: Profile) -> None:
    problem = Problem.of(profile)
    values = movable(problem)
    space = search_space_of(problem, values)
    assert sorted(value for role in space.roles for value in role) == values == sorted(space.role)
    for role in space.roles:
        assert all(space.role[value] == role for value in role)
        assert sorted(role) == role
        assert len({int(problem.rounded_bytes[value]) for value in role}) == 1
        assert len({re.sub(r"\d+", "", problem.names[value]) for value in role}) == 1
        assert len({problem.replay.replays[value] is None for value in role}) == 1
    assert sorted(space.by_size) == values
    assert (np.diff(problem.rounded_bytes[space.by_size]) >= 0).all()
    assert space.place == {value: place for place, value in enumerate(space.by_size)}


def test_each_layer_of_a_transformer_has_a_value_of_most_roles() -> None:
    layers = 6
    problem = Problem.of(transformer_like(layers))
    sizes = [len(role) for role in search_space_of(problem, movable(problem)).roles]
    assert sum(size for size in sizes if size % layers == 0) > sum(sizes) // 2


@pytest.mark.parametrize("left_out", [(), (0.3,), (0.6,)], ids=["all", "three in ten pinned", "six in ten pinned"])
def test_a_layer_that_decides_as_another_one_does_has_then_its_decisions(left_out: tuple[float, ...]) -> None:
    problem = Problem.of(transformer_like(6))
    copied = 0
    for seed in range(tries(100, 1000)):
        rng = random.Random(seed)
        values = [value for value in movable(problem) if not left_out or rng.random() > left_out[0]]
        steps = Steps(problem, values, temperature=inf)
        steps.begin_at(codes_of(random_decisions(problem, seed)))
        before, tried = steps.take(draws_of(KINDS["layer"], rng))
        changed = np.flatnonzero(tried != before)
        assert set(changed.tolist()) <= set(values)
        for value in changed.tolist():
            others = [v for v in steps.space.role[value] if v != value]
            assert tried[value] in before[others]
        copied += len(changed) > 1
    assert copied > 0
