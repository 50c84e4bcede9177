"""The search as a whole: interrupts, errors in its threads, what it says, what it may spend, and its plans."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan, SolveStatus
from poochplan.formats.profile import Profile
from poochplan.planner import plan, smallest_budget
from poochplan.planner.search import annealing, optimise, polish, walking
from poochplan.planner.search.allowance import Allowance, Progress, SearchLimits
from poochplan.planner.search.annealing import Walker
from poochplan.planner.search.bound import Proof
from poochplan.planner.simulator.evaluator import library
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import Candidate, try_decisions
from tests.depth import seeds, tries
from tests.planner.checker import check
from tests.planner.plans import budget_at
from tests.planner.random_profiles import random_profile, resnet_like, transformer_like, unet_like
from tests.planner.tiny_profiles import tiny_budget, tiny_profile

LONG_S = 600.0
"""Nothing here takes as long: what should end a search early, and does not, is noticed."""
NEVER_MET = 1e-12
"""A gap."""


tight = partial(budget_at, share=0.1)


@pytest.fixture(autouse=True)
def _ctrl_c_raises() -> Iterator[None]:
    """Also where this process was started so as to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("search")] == []


@pytest.fixture(autouse=True, scope="module")
def _what_is_compiled_is() -> None:
    library(None)


def large() -> Profile:
    """Large enough that a search for it goes on for seconds."""
    return transformer_like(16)


def assert_valid(profile: Profile, made: Plan) -> None:
    assert check(profile, made).peak_bytes <= made.budget_bytes
    assert made.prediction.peak_bytes <= made.budget_bytes


def interrupt(number: int = 1) -> Callable[..., None]:
    """Sends the interrupt at its ``number``-th call, from whatever thread."""
    calls = itertools.count(1)

    def call(*_: object) -> None:
        if next(calls) == number:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    return call


# -- interrupts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [*({"time_limit_s": LONG_S, "threads": threads} for threads in (1, 2, 3)), {"evaluations": 10**7}]
)
def test_an_interrupt_ends_the_search_with_the_best_plan_so_far(options: dict[str, Any]) -> None:
    profile = large()
    made = plan(profile, tight(profile), gap=NEVER_MET, watch=interrupt(2), keep_interrupted=True, **options)
    assert made.solve.status is SolveStatus.INTERRUPTED
    assert_valid(profile, made)


@pytest.mark.parametrize("threads", [1, 2])
def test_who_watches_may_end_it_with_the_best_plan_so_far(threads: int) -> None:
    profile = large()
    seen: list[float] = []

    def has_seen_three(progress: Progress) -> bool:
        seen.append(progress.step_s)
        return len(seen) >= 3

    limits = {"gap": NEVER_MET, "time_limit_s": LONG_S, "threads": threads}
    made = plan(profile, tight(profile), watch=has_seen_three, **limits)
    assert made.solve.status is SolveStatus.TIME_LIMIT
    assert made.solve.wall_s < LONG_S / 2
    assert made.prediction.step_s <= min(seen) + 1e-9
    assert_valid(profile, made)


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 2}, {"keep_interrupted": True}])
def test_an_interrupt_is_raised_where_nobody_asked_for_what_there_is_or_there_is_nothing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "keep_interrupted" in options:
        interrupt_at(monkeypatch, optimise, "choose_solver", 1)  # before there is a plan
    else:
        options = {**options, "watch": interrupt()}
    profile = large()
    with pytest.raises(KeyboardInterrupt):
        plan(profile, tight(profile), gap=NEVER_MET, time_limit_s=LONG_S, **options)


@pytest.mark.parametrize(
    ("owner", "name", "call", "options"),
    [
        (Walker, "try_styles", 3, {"time_limit_s": LONG_S}),
        (Walker, "try_styles", 5, {"time_limit_s": LONG_S}),
        (optimise, "polish", 1, {"evaluations": 500}),
    ],
    ids=["first plans", "a little later", "polished ones"],
)
def test_an_interrupt_among_the_first_plans_or_those_that_are_polished_keeps_the_best_of_them(
    owner: Any, name: str, call: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, owner, name, call)
    profile = large() if "time_limit_s" in options else transformer_like(6)
    made = plan(profile, tight(profile), gap=NEVER_MET, keep_interrupted=True, **options)
    assert made.solve.status is SolveStatus.INTERRUPTED
    assert_valid(profile, made)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Interrupts right before the ``call``-th call of a function."""
    real, once = getattr(owner, name), interrupt(call)

    def interrupted(*given: Any, **options: Any) -> Any:
        once()
        return real(*given, **options)

    monkeypatch.setattr(owner, name, interrupted)


# -- errors in threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Proof, "begin"), (Proof, "branch"), (Walker, "anneal"), (Walker, "descend"), (None, "who watches")],
)
def test_an_error_in_one_thread_or_of_the_one_who_watches_is_raised_and_ends_the_others(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Exception):
        pass

    def fails(*_: Any, **__: Any) -> None:
        raise Broken

    if owner is not None:
        monkeypatch.setattr(owner, name, fails)
    monkeypatch.setattr(walking, "EVALUATIONS_PER_VALUE", 5)
    monkeypatch.setattr(walking, "WALKS", 10**9)  # the others would go on to the end of their time
    profile = large()
    with pytest.raises(Broken):
        watch = fails if owner is None else None
        plan(profile, tight(profile), gap=NEVER_MET, time_limit_s=LONG_S, threads=3, watch=watch)


# -- what it says while it runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"time_limit_s": 1.5}, {"time_limit_s": 1.5, "threads": 3}, {"evaluations": 2000}])
def test_what_it_says_only_gets_better(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimise, "WATCHED_S", 0.02)
    told: list[Progress] = []
    where: set[threading.Thread] = set()

    def watch(progress: Progress) -> None:
        told.append(progress)
        where.add(threading.current_thread())

    profile = transformer_like(6)
    made = plan(profile, tight(profile), gap=NEVER_MET, watch=watch, **options)
    assert where == {threading.main_thread()}
    assert len(told) > 2
    for name in ("step_s", "gap", "left"):
        seen = [getattr(each, name) for each in told]
        assert seen == sorted(seen, reverse=True), name
    assert [each.bound_s for each in told] == sorted(each.bound_s for each in told)
    assert all(each.left >= 0 and each.is_counted == ("evaluations" in options) for each in told)
    assert all(each.gap >= max(0.0, each.step_s / each.bound_s - 1) - 1e-9 for each in told)
    assert made.solve.bound_s is not None
    assert made.prediction.step_s <= told[-1].step_s
    assert made.solve.bound_s >= told[-1].bound_s
    assert told[-1].overhead == pytest.approx(told[-1].step_s / made.prediction.in_core_step_s - 1)


# -- what it may spend ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluations", [1, 50, 400, 3000])
@pytest.mark.parametrize("profile", [unet_like(3), transformer_like(3)], ids=["unet", "gpt"])
def test_walks_and_polishing_simulate_no_more_than_was_asked(
    profile: Profile, evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans to begin at, and those of other policies, come on top."""
    counted: list[int] = []
    tell_simulations(monkeypatch, counted.append)
    plan(profile, tight(profile), evaluations=evaluations, gap=NEVER_MET)
    taken = sum(counted)
    at_once = annealing.SWEPT_AT_ONCE * 4  # a descent looks at its allowance after so many
    assert 0 < taken <= evaluations + at_once
    assert taken > evaluations // 3 or evaluations == 1


def tell_simulations(monkeypatch: pytest.MonkeyPatch, tell: Callable[[int], None]) -> None:
    """Tells the number of simulations of each step of a walk, descent or polishing."""

    def told(owner: Any, name: str, simulations: Callable[[Any], int]) -> None:
        real = getattr(owner, name)

        def call(*given: Any, **options: Any) -> Any:
            result = real(*given, **options)
            tell(simulations(result))
            return result

        monkeypatch.setattr(owner, name, call)

    told(annealing, "step", lambda _: 1)
    told(annealing, "sweep", lambda swept: swept[1])
    told(polish, "try_style", lambda _: 1)


@pytest.mark.parametrize("limit_s", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("profile", [unet_like(3), transformer_like(3)], ids=["unet", "gpt"])
def test_the_time_limit_is_kept(profile: Profile, limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    passed_s = 0.0

    def passes(simulations: int) -> None:
        nonlocal passed_s
        passed_s += 1e-3 * max(1, simulations)

    tell_simulations(monkeypatch, passes)
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0 + passed_s)  # time passes with work alone
    made = plan(profile, tight(profile), time_limit_s=limit_s, threads=1, gap=NEVER_MET)
    at_once_s = 1e-3 * annealing.SWEPT_AT_ONCE * 4
    assert passed_s <= limit_s + 1e-3 * 64 + at_once_s
    assert made.solve.wall_s == pytest.approx(passed_s)
    assert made.solve.status is SolveStatus.TIME_LIMIT
    assert_valid(profile, made)


# -- its plans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "threads"), [(unet_like(4), 1), (resnet_like(8), 2), (transformer_like(16), 3)])
def test_any_number_of_threads_has_a_plan_for_the_checker_when_time_is_over(profile: Profile, threads: int) -> None:
    made = plan(profile, tight(profile), time_limit_s=1.0, threads=threads, gap=NEVER_MET)
    assert_valid(profile, made)
    assert made.solve.status is SolveStatus.TIME_LIMIT
    assert made.solve.bound_s is not None
    assert made.solve.bound_s <= made.prediction.step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("seed", "threads"), [*((seed, 1) for seed in seeds(12, 150)), *((seed, 2) for seed in seeds(4, 150))]
)
def test_no_plan_is_worse_than_that_of_greedy_or_of_pooch(seed: int, threads: int) -> None:
    profile = random_profile(seed, 12 + seed)
    if smallest_budget(profile) >= profile.in_core_peak_bytes:
        pytest.skip("nothing that moves lowers the peak")
    budget_bytes = tight(profile, share=0.1 + 0.05 * (seed % 10))
    effort: dict[str, Any] = {"evaluations": 3000} if threads == 1 else {"time_limit_s": 30.0, "threads": threads}
    made = plan(profile, budget_bytes, gap=NEVER_MET, **effort)
    assert_valid(profile, made)
    for policy in ("greedy", "pooch"):
        try:
            other = plan(profile, budget_bytes, policy=policy)
        except InfeasibleError:
            continue
        assert made.prediction.step_s <= other.prediction.step_s * (1 + 1e-6)


@pytest.mark.parametrize("profile", [unet_like(3), transformer_like(3)], ids=["unet", "gpt"])
def test_a_plan_that_another_proposes_is_taken_where_the_search_has_none_as_good(profile: Profile) -> None:
    problem, budget_bytes = Problem.of(profile), tight(profile)
    one, many = (SearchLimits(evaluations=count, threads=1, gap=NEVER_MET) for count in (1, 4000))
    alone, best = (optimise.optimise(problem, budget_bytes, effort).best for effort in (one, many))
    assert best.simulation.step_s < alone.simulation.step_s
    asked: list[Allowance] = []

    def propose(allowance: Allowance) -> Candidate:
        asked.append(allowance)
        return try_decisions(problem, "other", best.wish, budget_bytes)

    proposed = propose(Allowance(evaluations=1)).simulation.step_s
    found = optimise.optimise(problem, budget_bytes, one, [propose, propose]).best
    assert found.simulation.step_s <= proposed < alone.simulation.step_s
    assert len(asked) == 3
    assert all(each.is_counted for each in asked)


@pytest.mark.parametrize("seed", seeds(day=4, deep=60))
def test_where_all_ways_to_decide_are_tried_it_says_that_it_has_searched(seed: int) -> None:
    profile = tiny_profile(seed)
    made = plan(profile, tiny_budget(profile, seed), threads=1, gap=NEVER_MET, time_limit_s=LONG_S)
    assert made.solve.gap is not None
    expected = SolveStatus.WITHIN_GAP if made.solve.gap <= 1e-9 else SolveStatus.SEARCHED
    assert made.solve.status is expected


@pytest.mark.parametrize("threads", [1, 2])
def test_it_says_within_the_gap_where_it_is_and_ends_there(threads: int) -> None:
    profile = large()
    made = plan(profile, tight(profile), gap=2.0, time_limit_s=LONG_S, threads=threads)
    assert made.solve.status is SolveStatus.WITHIN_GAP
    assert made.solve.gap is not None
    assert made.solve.gap <= 2.0


@pytest.mark.parametrize("seed", range(tries(10, 60)))
@pytest.mark.parametrize("evaluations", [1, 300])
def test_a_host_that_holds_nothing_has_a_plan_or_none_is_found(seed: int, evaluations: int) -> None:
    profile = random_profile(seed, 15)
    smallest = smallest_budget(profile)
    if smallest >= profile.in_core_peak_bytes:
        pytest.skip("nothing that moves lowers the peak")
    try:
        made = plan(profile, smallest, host_budget=1, evaluations=evaluations)
    except InfeasibleError:
        return
    assert made.prediction.out_bytes <= 1
    assert_valid(profile, made)
