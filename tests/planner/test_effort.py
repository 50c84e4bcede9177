"""Counted planning: the plan depends on profile, budget and effort alone, and no clock decides."""

from __future__ import annotations

import random
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from poochplan.errors import UsageError
from poochplan.formats.profile import Profile
from poochplan.planner import Plan, plan
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
