"""What a search may spend: a counted plan depends on its arguments alone, and no part outlives its whole."""

from __future__ import annotations

import random
import time
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from poochplan.errors import UsageError
from poochplan.formats.plan import SolveStatus
from poochplan.formats.profile import Profile
from poochplan.planner import Plan, plan
from poochplan.planner.search.allowance import Allowance
from tests.planner.plans import budget_at
from tests.planner.random_profiles import random_profile, resnet_like, transformer_like, unet_like
from tests.processes import python

EVALUATIONS = 2000
UNET = unet_like(3)
tight = partial(budget_at, share=0.1)


def counted(profile: Profile, evaluations: int = EVALUATIONS, seed: int = 0) -> Plan:
    """A gap too small to be met: the search goes on until its count is spent."""
    return plan(profile, tight(profile), evaluations=evaluations, seed=seed, gap=1e-6)


def content(made: Plan) -> bytes:
    """All of the plan but how long it took."""
    return msgspec.json.encode(msgspec.structs.replace(made, solve=msgspec.structs.replace(made.solve, wall_s=0.0)))


@cache
def first() -> Plan:
    """The plan that others are compared with."""
    return counted(UNET)


PROFILES = {"gpt": transformer_like(2), "resnet": resnet_like(2), "random": random_profile(3), "unet": UNET}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_the_same_call_makes_the_same_plan_and_no_clock_decides(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, rng = content(counted(profile)), random.Random(0)
    assert content(counted(profile)) == calm
    # Hours pass between two looks at the clock, now forwards and now backwards.
    monkeypatch.setattr(time, "perf_counter", lambda: rng.uniform(-1e6, 1e6))
    assert content(counted(profile)) == calm


def test_with_a_time_limit_that_clock_does_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = iter(range(0, 10**9, 3600))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(hours)))
    assert plan(UNET, tight(UNET), threads=1, gap=1e-6).solve.status == "time limit"


PLAN_ELSEWHERE = """\
import sys
from poochplan import Profile, plan
profile, budget, evaluations, output = sys.argv[1:]
plan(Profile.load(profile), int(budget), evaluations=int(evaluations), gap=1e-6).save(output)
"""


def test_two_processes_with_other_hash_seeds_make_the_same_plan(tmp_path: Path) -> None:
    given = UNET.save(tmp_path / "profile.json"), tight(UNET), EVALUATIONS
    for seed in ("1", "2"):
        python(PLAN_ELSEWHERE, *given, tmp_path / seed, is_fresh=True, PYTHONHASHSEED=seed)
        assert content(Plan.load(tmp_path / seed)) == content(first())


def test_the_seed_changes_the_walk() -> None:
    decided = {tuple(value.decision for value in counted(UNET, seed=seed).values) for seed in range(3)}
    assert len(decided) > 1


def test_what_is_counted_limits_the_search() -> None:
    assert first().prediction.step_s < counted(UNET, 4).prediction.step_s


def test_the_plan_says_what_ended_the_search_and_what_was_asked() -> None:
    solve = counted(UNET, seed=5).solve
    assert (solve.status, solve.evaluations, solve.seed) == ("evaluation limit", EVALUATIONS, 5)
    timed = plan(UNET, tight(UNET), time_limit_s=0.1).solve
    assert (timed.evaluations, timed.seed) == (None, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluations": 9, "threads": 2}, "expected 1 with evaluations, found 2"),
        ({"evaluations": 0}, "evaluations: expected at least 1, found 0"),
        ({"seed": -1}, "seed: expected at least 0, found -1"),
        ({"evaluations": 9, "solver": "cbc"}, "expected highs with evaluations, found 'cbc'"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        plan(UNET, tight(UNET), **options)
    assert "\n" not in str(caught.value)


@pytest.fixture(params=[{"limit_s": 100.0}, {"evaluations": 1000}], ids=["time", "count"])
def whole(request: pytest.FixtureRequest) -> Allowance:
    return Allowance(**request.param)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until it is told."""
    made = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: made.now_s)
    return made


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "ended"])
def test_the_end_of_the_whole_is_that_of_its_parts_and_theirs_before_and_after_it(
    whole: Allowance, is_stopped: bool
) -> None:
    own = whole.part(0.9)
    before = [own, own.part(0.5), own.part(0.5).part(0.5, 7), own.part(0.5).part(0.5)]
    assert not any(each.is_spent for each in before)
    own.stop() if is_stopped else own.end()
    for each in (*before, own.part(0.9), before[1].part(1.0)):
        assert each.is_spent
        assert each.progress == 1.0
        assert not each.spend()
    at_limit = {SolveStatus.TIME_LIMIT, SolveStatus.EVALUATION_LIMIT}
    assert own.status in ({SolveStatus.INTERRUPTED} if is_stopped else at_limit)
    if is_stopped:
        assert before[-1].left == 0
        limits = before[-1].limits()
        assert limits.most_checks == 0 if own.is_counted else limits.time_s <= 0.1
    assert not whole.is_spent
    assert not whole.part(0.5).is_spent
    assert whole.status is SolveStatus.SEARCHED


def test_a_part_has_its_share_of_the_seconds_and_no_more_than_the_whole(clock: SimpleNamespace) -> None:
    whole = Allowance(100.0)
    clock.now_s = 20.0
    part = whole.part(0.5)
    late = whole.part(1.0)
    assert (part.left, late.left, part.limits().time_s) == (40.0, 80.0, 40.0)
    assert part.progress == 0.0
    clock.now_s = 40.0
    assert part.progress == 0.5
    clock.now_s = 60.0
    assert (part.is_spent, whole.is_spent) == (True, False)
    clock.now_s = 100.0
    assert whole.is_spent
    assert late.is_spent
    assert whole.status is SolveStatus.TIME_LIMIT
    assert whole.part(1.0).is_spent


def test_a_part_in_time_may_be_limited_in_simulations_too_and_so_are_its_own_parts(clock: SimpleNamespace) -> None:
    part = Allowance(100.0).part(0.5, 10)
    deep = part.part(0.5)
    assert part.spend(5)
    assert (part.progress, deep.is_spent) == (0.5, False)
    assert part.spend(5)
    assert part.is_spent
    assert deep.is_spent
    assert not part.spend()


def test_what_a_part_counts_is_taken_from_every_whole() -> None:
    whole = Allowance(evaluations=1000)
    part = whole.part(0.5)
    deep = part.part(0.5, 20)
    assert (part.left, deep.left) == (500, 20)
    assert deep.spend(15)
    assert (whole.left, part.left, deep.left) == (985, 485, 5)
    assert not deep.spend(6)
    assert (deep.is_spent, part.is_spent) == (True, False)


def test_a_part_ends_with_a_whole_that_others_have_spent() -> None:
    whole = Allowance(evaluations=100)
    one, other = whole.part(0.8), whole.part(0.8)
    assert one.spend(60)
    assert not other.spend(60)
    assert other.is_spent
    assert whole.status is SolveStatus.EVALUATION_LIMIT
    small = Allowance(evaluations=5)
    assert [small.part(1.0, 3).spend() for _ in range(2)] == [True, True]
    stage = small.part(1.0, 10)
    assert [stage.spend() for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("evaluations", [1, 7, 64, 65, 1000])
def test_asking_before_each_batch_never_takes_more_than_was_asked(evaluations: int) -> None:
    allowance, taken = Allowance(evaluations=evaluations), 0
    while not allowance.is_spent:
        steps = allowance.at_once()
        assert steps >= 1
        taken += steps
        allowance.spend(steps)
    assert taken == evaluations
    assert allowance.progress == 1.0
