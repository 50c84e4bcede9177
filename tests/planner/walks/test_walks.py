"""Walks through decisions: where they may go, what they bring back, and that compiled and plain code take the same."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np
import pytest

from poochplan.errors import PoochError
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Kind, Profile
from poochplan.planner.allowance import CountAllowance
from poochplan.planner.evaluator.codes import KEEP, RECOMPUTE, SWAP, codes_of, decisions_of
from poochplan.planner.evaluator.layout import layout_of
from poochplan.planner.evaluator.scratch import scratch_for
from poochplan.planner.judge.candidate import movable, swap_all, swap_all_on_demand
from poochplan.planner.problem.arrays import Bytes, Ints
from poochplan.planner.problem.problem import Problem, build_problem
from poochplan.planner.walks import annealing
from poochplan.planner.walks.annealing import Walker, ground_of
from poochplan.planner.walks.descent import FAR_OFF, MIN_GAIN, SEARCH_STYLES
from poochplan.planner.walks.incumbents import Found, Incumbents
from poochplan.planner.walks.walk import DRAWS, STYLES, Ground, Limits, Trail, scored, walk_on
from tests.depth import tries
from tests.planner.evaluator.test_evaluator import run_python
from tests.planner.plans import random_decisions
from tests.planner.random_profiles import (
    Recorder,
    link,
    random_profile,
    resnet_like,
    transformer_like,
    unet_like,
    with_random_thread,
)

STEPS = 400
WARMTH = 0.01
HIGHEST_DRAW = float(np.nextafter(1.0, 0.0))
KINDS = {"exchange": 0.1, "few": 0.4, "role": 0.7, "window": 0.8, "layer": 0.9, "take over": 0.96, "style": 0.99}
"""A first draw of a step, by the change that it leads to."""


def random_problems(count: int) -> Iterator[tuple[int, Problem]]:
    """So many problems of up to 60 ops, among them some with a launching thread."""
    seed = found = 0
    while found < count:
        profile = random_profile(seed, 5 + 7 * seed % 55)
        try:
            yield seed, build_problem(with_random_thread(profile, seed) if seed % 3 else profile)
            found += 1
        except PoochError:  # nothing is saved
            pass
        seed += 1


def tight(problem: Problem, share: float = 0.3) -> int:
    """Between the smallest budget and what keeping everything takes."""
    smallest = swap_all_on_demand(problem).peak_bytes
    return smallest + int(share * max(0, int(problem.base_bytes.max() + problem.rounded_bytes.sum()) - smallest))


def walker_for(
    problem: Problem,
    budget_bytes: int | None = None,
    host_bytes: int | None = None,
    values: Sequence[int] | None = None,
) -> Walker:
    found = Incumbents(problem, tight(problem) if budget_bytes is None else budget_bytes, host_bytes)
    return Walker(problem, layout_of(problem), movable(problem) if values is None else values, found)


def anneal(walker: Walker, begin: Found, evaluations: int = STEPS, seed: int = 0, **options: Sequence[int]) -> Found:
    return walker.anneal(
        begin, CountAllowance(evaluations), temperature=WARMTH, seed=seed, pinned=options.get("pinned", ())
    )


def begin_at(walker: Walker, wish: Sequence[Decision] | None = None) -> Found:
    return walker.try_styles(codes_of(swap_all(walker.problem) if wish is None else wish), "here")


@dataclass
class Steps:
    """State: a walk that is taken one step at a time, so that every trial can be looked at."""

    problem: Problem
    values: Sequence[int]
    temperature: float = WARMTH
    mate: Bytes | None = None
    trail: Trail = field(init=False)
    ground: Ground = field(init=False)

    def __post_init__(self) -> None:
        self.layout = layout_of(self.problem)
        self.scratch = scratch_for(self.layout)
        self.limits = Limits(tight(self.problem), -1)
        self.ground = ground_of(self.problem, self.values)
        here = codes_of(swap_all(self.problem))
        first = scored(self.layout, self.scratch, self.limits, 0, here)
        self.trail = Trail(
            here=here,
            best=here.copy(),
            trial=here.copy(),
            mate=here.copy() if self.mate is None else self.mate,
            scores=np.array([first, first]),
            styles=np.array([0, 0]),
        )

    def take(self, draws: Sequence[float]) -> tuple[Bytes, Bytes]:
        """Where the walk was before the step, and what the step tried."""
        before = self.trail.here.copy()
        given = np.array(draws)
        walk_on(self.layout, self.scratch, self.ground, self.trail, self.limits, 1, self.temperature, given)
        return before, self.trail.trial.copy()


def draws_of(kind: float, rng: random.Random) -> list[float]:
    return [kind, *(rng.random() for _ in range(DRAWS - 2)), 0.0]


def assert_possible(problem: Problem, wish: Bytes) -> None:
    """Each value has a decision that it can have."""
    for value, code in enumerate(wish.tolist()):
        assert code in (KEEP, SWAP, RECOMPUTE)
        assert code == KEEP or not problem.must_keep[value]
        assert code != RECOMPUTE or problem.replay.replays[value] is not None


# -- compiled or not --------------------------------------------------------------------------------------------------


TRAILS = """
from poochplan.planner.evaluator.compiled import is_compiled
from tests.planner.walks.test_walks import trails
assert is_compiled() is {compiled}
print(*trails(), sep="\\n")
"""


def trails() -> list[str]:
    """What walks and descents from the same numbers come by: of each one the seconds to the bit, and the decisions."""
    said: list[str] = []
    for seed, problem in random_problems(8):
        for host_bytes in (None, int(problem.size_bytes.sum()) // 3):
            walker = walker_for(problem, host_bytes=host_bytes)
            begin = begin_at(walker, random_decisions(problem, seed))
            found = anneal(walker, begin, 60, seed)
            for each in (begin, found, walker.descend(found, CountAllowance(60))):
                said.append(f"{each.step_s.hex()} {each.peak_bytes} {each.style} {each.wish.tobytes().hex()}")
    return said


def test_plain_python_walks_the_same_trail_as_compiled_code() -> None:
    plain = run_python(TRAILS.format(compiled=False), NUMBA_DISABLE_JIT="1").splitlines()
    assert plain == trails()
    assert len(set(plain)) > len(plain) // 3


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
        start = steps.trail.here.copy()
        others = [value for value in range(problem.value_count) if value not in values]
        for _ in range(60):
            before, tried = steps.take(draws_of(kind if rng.random() < 0.7 else rng.random(), rng))
            assert_possible(problem, tried)
            assert (tried[others] == start[others]).all()
            changed += int((tried != before).sum())
    assert changed > 0


def test_the_smallest_and_the_largest_draws_lead_nowhere_else() -> None:
    for seed, problem in random_problems(tries(12, 60)):
        if not movable(problem):
            continue
        rng = random.Random(seed)
        steps = Steps(problem, movable(problem), temperature=inf)
        for kind in KINDS.values():
            for _ in range(30):
                steps.take([kind, *(rng.choice((0.0, HIGHEST_DRAW)) for _ in range(DRAWS - 1))])
                assert_possible(problem, steps.trail.here)
                assert 0 <= steps.trail.styles[0] < STYLES


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_reads_no_draw_of_the_next_one(kind: float) -> None:
    profile = transformer_like(4)
    problem = build_problem(profile)
    for seed in range(30):
        rng = random.Random(seed)
        draws = draws_of(kind, rng)
        tried = [Steps(problem, movable(problem)).take([*draws, *([more] * DRAWS)])[1] for more in (0.0, HIGHEST_DRAW)]
        assert (tried[0] == tried[1]).all()


def test_the_last_draw_of_a_step_is_for_its_temperature_alone() -> None:
    problem = build_problem(transformer_like(4))
    for seed in range(60):
        rng = random.Random(seed)
        draws = draws_of(list(KINDS.values())[seed % len(KINDS)], rng)
        tried = [Steps(problem, movable(problem)).take([*draws[:-1], last])[1] for last in (0.0, HIGHEST_DRAW)]
        assert (tried[0] == tried[1]).all()


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
    problem = build_problem(transformer_like(2))
    rng = random.Random(0)
    taken = {}
    for temperature in (1e-12, 1e12):
        steps, worse = Steps(problem, movable(problem), temperature), 0
        for _ in range(200):
            before = float(steps.trail.scores[0])
            draws = draws_of(rng.random(), rng)
            steps.take([*draws[:-1], 0.5])
            worse += float(steps.trail.scores[0]) > before
            assert steps.trail.scores[1] <= steps.trail.scores[0]
        taken[temperature] = worse
    assert taken[1e-12] == 0
    assert taken[1e12] > 10


def test_a_walk_knows_the_scores_of_where_it_is_and_of_its_best() -> None:
    problem = build_problem(transformer_like(3))
    rng = random.Random(0)
    steps = Steps(problem, movable(problem))
    styles = set()
    for _ in range(200):
        steps.take([rng.choice(list(KINDS.values())), *(rng.random() for _ in range(DRAWS - 1))])
        trail = steps.trail
        for which, wish in enumerate((trail.here, trail.best)):
            style = int(trail.styles[which])
            assert trail.scores[which] == scored(steps.layout, steps.scratch, steps.limits, style, wish)
        styles.add(int(trail.styles[1]))
    assert len(styles) > 1


def test_steps_at_once_are_the_same_as_one_by_one() -> None:
    problem = build_problem(transformer_like(3))
    rng = random.Random(0)
    draws = np.array([rng.random() for _ in range(40 * DRAWS)])
    at_once, one_by_one = Steps(problem, movable(problem)), Steps(problem, movable(problem))
    walk_on(
        at_once.layout, at_once.scratch, at_once.ground, at_once.trail, at_once.limits, 40, at_once.temperature, draws
    )
    for first in range(0, len(draws), DRAWS):
        one_by_one.take(draws[first : first + DRAWS].tolist())
    for name in Trail._fields:
        assert np.array_equal(getattr(at_once.trail, name), getattr(one_by_one.trail, name))


# -- values that belong together --------------------------------------------------------------------------------------


def groups(ground: Ground) -> list[Ints]:
    return [ground.role_values[a:b] for a, b in zip(ground.role_first[:-1], ground.role_first[1:], strict=True)]


@pytest.mark.parametrize("profile", [transformer_like(4), resnet_like(8), unet_like(4)], ids=["gpt", "resnet", "unet"])
def test_values_of_one_role_are_alike_and_every_value_has_one_role(profile: Profile) -> None:
    problem = build_problem(profile)
    values = movable(problem)
    ground = ground_of(problem, values)
    assert sorted(ground.role_values.tolist()) == values
    for index, group in enumerate(groups(ground)):
        assert (ground.role[group] == index).all()
        assert sorted(group.tolist()) == group.tolist()
        assert len({int(problem.rounded_bytes[value]) for value in group}) == 1
        assert len({re.sub(r"\d+", "", problem.names[value]) for value in group}) == 1
        assert len({problem.replay.replays[value] is None for value in group}) == 1
    assert sorted(ground.by_size.tolist()) == values
    assert (np.diff(problem.rounded_bytes[ground.by_size]) >= 0).all()
    assert (ground.place[ground.by_size] == np.arange(len(values))).all()
    away = [value for value in range(problem.value_count) if value not in values]
    assert (ground.role[away] == -1).all()
    assert (ground.place[away] == -1).all()


def test_each_layer_of_a_transformer_has_a_value_of_most_roles() -> None:
    layers = 6
    problem = build_problem(transformer_like(layers))
    sizes = [len(group) for group in groups(ground_of(problem, movable(problem)))]
    assert sum(size for size in sizes if size % layers == 0) > sum(sizes) // 2


@pytest.mark.parametrize("left_out", [(), (0.3,), (0.6,)], ids=["all", "three in ten pinned", "six in ten pinned"])
def test_a_layer_that_decides_as_another_one_does_has_then_its_decisions(left_out: tuple[float, ...]) -> None:
    problem = build_problem(transformer_like(6))
    copied = 0
    for seed in range(tries(100, 1000)):
        rng = random.Random(seed)
        values = [value for value in movable(problem) if not left_out or rng.random() > left_out[0]]
        steps = Steps(problem, values, temperature=inf)
        steps.trail.here[:] = codes_of(random_decisions(problem, seed))
        before, tried = steps.take(draws_of(KINDS["layer"], rng))
        changed = np.flatnonzero(tried != before)
        assert set(changed.tolist()) <= set(values)
        for value in changed.tolist():
            role = steps.ground.role[value]
            others = [v for v in groups(steps.ground)[role].tolist() if v != value]
            assert tried[value] in before[others]
        copied += len(changed) > 1
    assert copied > 0


# -- what a walk brings back ------------------------------------------------------------------------------------------


def test_the_best_of_a_walk_is_no_worse_than_its_begin_and_the_simulator_says_the_same_of_it() -> None:
    better = 0
    for seed, problem in random_problems(tries(12, 100)):
        walker = walker_for(problem)
        begin = begin_at(walker, random_decisions(problem, seed))
        annealed = anneal(walker, begin, seed=seed)
        for found in (begin, annealed, walker.descend(annealed, CountAllowance(STEPS)), walker.incumbents.best()):
            judged = walker.incumbents.judged(found)
            assert judged.simulation.step_s == found.step_s
            assert judged.peak_bytes == found.peak_bytes
            assert judged.simulation.out_bytes + judged.simulation.in_bytes == found.moved_bytes
            assert judged.schedule.decisions == decisions_of(found.decisions)
            assert_possible(problem, found.wish)
        assert score_of(walker, annealed) <= score_of(walker, begin)
        better += score_of(walker, annealed) < score_of(walker, begin)
    assert better > 0


def score_of(walker: Walker, found: Found) -> float:
    given = walker.incumbents
    layout = layout_of(walker.problem)
    limits = Limits(given.budget_bytes, given.host_bytes)
    return scored(layout, scratch_for(layout), limits, found.style, found.wish)


def test_a_walk_so_hot_that_it_takes_every_change_still_brings_back_its_best() -> None:
    for seed, problem in random_problems(tries(6, 40)):
        walker = walker_for(problem)
        begin = walker.descend(begin_at(walker), CountAllowance(10_000))
        found = walker.anneal(begin, CountAllowance(64), temperature=1e6, seed=seed)
        assert score_of(walker, found) <= score_of(walker, begin)


def test_a_walk_offers_the_best_that_it_meets() -> None:
    problem = build_problem(transformer_like(3))
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
        walker.descend(anneal(walker, begin, seed=seed), CountAllowance(STEPS))
        for found in walker.incumbents.ranked():
            swapped = [v for v, d in enumerate(found.decisions.tolist()) if d == SWAP]
            assert sum(int(problem.size_bytes[value]) for value in swapped) <= host_bytes
            assert walker.incumbents.fits(walker.incumbents.judged(found))
        began = sum(int(problem.size_bytes[v]) for v, d in enumerate(begin.decisions.tolist()) if d == SWAP)
        limited += began > host_bytes and bool(walker.incumbents.ranked())
    assert limited > 0


def test_a_walk_takes_no_more_evaluations_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build_problem(transformer_like(3))
    taken = 0

    def counted(*given: Any) -> int:
        nonlocal taken
        spent = int(walk_on(*given))
        taken += spent
        return spent

    monkeypatch.setattr(annealing, "walk_on", counted)
    for most in (1, 63, 64, 65, 500):
        taken = 0
        walker = walker_for(problem)
        anneal(walker, begin_at(walker), most)
        assert 0 < taken <= most


# -- descent ----------------------------------------------------------------------------------------------------------


def test_a_descent_ends_where_no_single_change_gains() -> None:
    moved = 0
    for seed, problem in random_problems(tries(12, 100)):
        walker = walker_for(problem, host_bytes=None if seed % 2 else int(problem.size_bytes.sum()) // 3)
        begin = begin_at(walker, random_decisions(problem, seed))
        end = walker.descend(begin, CountAllowance(100_000))
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
        end = walker.descend(begin, CountAllowance(10_000))
        assert set(np.flatnonzero(end.wish != begin.wish).tolist()) <= set(values)
        assert_possible(problem, end.wish)


# -- the smallest problems --------------------------------------------------------------------------------------------


def one_value() -> Problem:
    r = Recorder()
    (x,) = r.op("make", [r.before(512, Kind.INPUT)], [1 << 20])
    r.op("use", [x], [512], saves=[x], workspace_bytes=4 << 20)
    return build_problem(r.finish(link()))


def test_a_walk_over_one_value_finds_its_best_decision() -> None:
    problem = one_value()
    assert len(movable(problem)) == 1
    walker = walker_for(problem)
    begin = begin_at(walker)
    for found in (anneal(walker, begin), walker.descend(begin, CountAllowance(100))):
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


def test_a_walk_over_no_value_stays_where_it_is() -> None:
    problem = one_value()
    walker = walker_for(problem, values=())
    begin = begin_at(walker)
    assert anneal(walker, begin) is begin
    assert (walker.descend(begin, CountAllowance(100)).wish == begin.wish).all()


def test_a_walk_with_every_value_pinned_stays_where_it_is() -> None:
    problem = build_problem(unet_like(2))
    walker = walker_for(problem)
    begin = begin_at(walker)
    assert anneal(walker, begin, pinned=movable(problem)) is begin
