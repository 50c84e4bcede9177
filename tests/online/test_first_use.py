"""The first use on a machine, where what searches for plans is not compiled: a plan comes soon, and may be replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

import poochplan
from poochplan.formats.plan import Plan, SolveStatus
from poochplan.formats.profile import Profile
from poochplan.online.plans.background import Background
from poochplan.online.plans.known_plans import KnownPlans, _is_last
from poochplan.planner.walks import warming
from tests.online.runs import run_auto, run_plain
from tests.online.trainings import dropout_and_batch_norm
from tests.runtime.nets import CASES


class Noted(Background):
    """State: all that were made, of all tests."""

    made: ClassVar[list[Noted]] = []

    def __init__(self, profile: Profile, budget_bytes: int, *others: Any, **options: Any) -> None:
        super().__init__(profile, budget_bytes, *others, **options)
        self.made.append(self)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, planner_is_compiled: None) -> None:
    monkeypatch.setattr("poochplan.online.plans.known_plans.is_cold", lambda: True)
    monkeypatch.setattr("poochplan.online.plans.known_plans.Background", Noted)
    Noted.made.clear()


@pytest.fixture
def in_force(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """Of each plan that is put in force: seconds of its step, and how many searches had been asked for by then."""
    noted: list[tuple[float, int]] = []
    put_in_force = KnownPlans.put_in_force

    def and_noted(self: KnownPlans, key: Any, plan: Plan) -> None:
        noted.append((plan.prediction.step_s, len(Noted.made)))
        put_in_force(self, key, plan)

    monkeypatch.setattr(KnownPlans, "put_in_force", and_noted)
    return noted


def test_behind_another_one_it_is_searched_for_with_compiled_code_while_that_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_force: list[tuple[float, int]]
) -> None:
    monkeypatch.setattr("poochplan.online.plans.background.PLAIN_S", 0.001)
    found = run_auto(dropout_and_batch_norm, "60%", tmp_path, turns=30, time_limit_s=20)
    assert [one.is_plain for one in Noted.made][:2] == [True, False]
    assert len({one.budget_bytes for one in Noted.made}) == 1
    assert in_force[0][1] == 1  # there was no other search yet
    steps_s = [step_s for step_s, _ in in_force]
    assert steps_s == sorted(set(steps_s), reverse=True)  # and another one only where it is faster
    assert found.equals(run_plain(dropout_and_batch_norm, 30))


def test_a_first_plan_is_kept_for_the_next_run_only_if_it_is_proven_good_enough(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        profile = CASES["residual"].profile()
    found = poochplan.plan(profile, "100%", arena="off")
    late = msgspec.structs.replace(found, solve=msgspec.structs.replace(found.solve, status=SolveStatus.TIME_LIMIT))
    plain, compiled = (Background(profile, found.budget_bytes, 1.0, is_plain=is_plain) for is_plain in (True, False))
    assert _is_last(plain, found)
    assert not _is_last(plain, late)
    assert _is_last(compiled, late)
    plain.close()
    compiled.close()


def test_a_machine_is_cold_until_a_search_has_been_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "folder_of", lambda _: tmp_path)
    monkeypatch.setattr(warming, "is_compiled", lambda: True)
    assert warming.is_cold()
    warming._mark()
    assert not warming.is_cold()
    monkeypatch.setattr(warming, "is_compiled", lambda: False)
    assert not warming.is_cold()  # nothing will ever be compiled
