"""Allowances: a part never outlives the whole, and what is asked for is not exceeded."""

from __future__ import annotations

import time

import pytest

from poochplan.formats.plan import SolveStatus
from poochplan.planner.search.allowance import Allowance


@pytest.fixture(params=[{"limit_s": 100.0}, {"evaluations": 1000}], ids=["time", "count"])
def whole(request: pytest.FixtureRequest) -> Allowance:
    return Allowance(**request.param)


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def test_stopping_the_whole_ends_its_parts_and_theirs(whole: Allowance) -> None:
    before = [whole.part(0.9), whole.part(0.9).part(0.5), whole.part(0.9).part(0.5).part(0.5, 7)]
    assert not any(each.is_spent for each in before)
    whole.stop()
    after = [whole.part(0.9), before[0].part(1.0)]
    for each in (whole, *before, *after):
        assert each.is_spent
        assert each.progress == 1.0
        assert not each.spend()
    assert whole.status is SolveStatus.INTERRUPTED


def test_what_is_ended_is_spent_as_at_its_limit(whole: Allowance) -> None:
    ended = whole.part(0.9)
    part = ended.part(0.5)
    ended.end()
    for each in (ended, part, ended.part(1.0)):
        assert each.is_spent
        assert not each.spend()
    assert ended.status in {SolveStatus.TIME_LIMIT, SolveStatus.EVALUATION_LIMIT}
    assert not whole.is_spent


def test_stopping_a_part_leaves_the_whole(whole: Allowance) -> None:
    part, other = whole.part(0.5), whole.part(0.5)
    part.stop()
    assert part.is_spent
    assert not other.is_spent
    assert not whole.is_spent
    assert whole.status is SolveStatus.SEARCHED


def test_of_what_is_stopped_nothing_is_left_however_deep(whole: Allowance) -> None:
    deep = whole.part(0.9).part(0.5).part(0.5)
    whole.stop()
    assert deep.left == 0
    limits = deep.limits()
    assert limits.most_checks == 0 if deep.is_counted else limits.time_s <= 0.1


def test_a_part_has_its_share_of_the_seconds_and_no_more_than_the_whole(clock: Clock) -> None:
    whole = Allowance(100.0)
    clock.now_s = 20.0
    part = whole.part(0.5)
    late = whole.part(1.0)
    assert (part.left, late.left, part.limits().time_s) == (40.0, 80.0, 40.0)
    assert part.progress == 0.0
    clock.now_s = 40.0
    assert part.progress == 0.5
    clock.now_s = 60.0
    assert part.is_spent
    assert not whole.is_spent
    clock.now_s = 100.0
    assert whole.is_spent
    assert late.is_spent
    assert whole.status is SolveStatus.TIME_LIMIT
    assert whole.part(1.0).is_spent


def test_a_part_in_time_may_be_limited_in_simulations_too(clock: Clock) -> None:
    part = Allowance(100.0).part(0.5, 10)
    assert part.spend(5)
    assert part.progress == 0.5
    assert part.spend(5)
    assert part.is_spent
    assert not part.spend()


def test_where_a_part_has_spent_its_simulations_its_own_parts_are_spent_too(clock: Clock) -> None:
    part = Allowance(100.0).part(0.5, 10)
    deep = part.part(0.5)
    assert not deep.is_spent
    part.spend(10)
    assert deep.is_spent


def test_what_a_part_counts_is_taken_from_every_whole() -> None:
    whole = Allowance(evaluations=1000)
    part = whole.part(0.5)
    deep = part.part(0.5, 20)
    assert (part.left, deep.left) == (500, 20)
    assert deep.spend(15)
    assert (whole.left, part.left, deep.left) == (985, 485, 5)
    assert not deep.spend(6)
    assert deep.is_spent
    assert not part.is_spent


def test_a_part_ends_with_a_whole_that_others_have_spent() -> None:
    whole = Allowance(evaluations=100)
    one, other = whole.part(0.8), whole.part(0.8)
    assert one.spend(60)
    assert not other.spend(60)
    assert other.is_spent
    assert whole.status is SolveStatus.EVALUATION_LIMIT


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


def test_a_stage_of_counted_simulations_ends_with_the_allowance_that_it_is_taken_from() -> None:
    whole = Allowance(evaluations=5)
    assert [whole.part(1.0, 3).spend() for _ in range(2)] == [True, True]
    stage = whole.part(1.0, 10)
    assert [stage.spend() for _ in range(4)] == [True, True, True, False]
