"""The plan book: which plan steps of given inputs follow, whoever has put it there."""

from __future__ import annotations

import msgspec
import pytest

from poochplan.formats.plan import Plan
from poochplan.planner.planning import plan
from poochplan.runtime.active_plan import MOST_PLANS, REMEDY, STILL_GROWS
from poochplan.runtime.plan_book import PlanBook
from tests.planner.random_profiles import resnet_like


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(resnet_like(3), "80%", policy="greedy")


def of_rows(made: Plan, *rows: int) -> PlanBook:
    """A book with plans for inputs of so many rows."""
    book = PlanBook()
    for count in rows:
        book.put(count, msgspec.structs.replace(made, inputs=(f"0 float32[{count}, 4]",)))
    return book


def test_steps_follow_the_plan_of_their_inputs_and_else_that_of_the_nearest_larger_ones(made: Plan) -> None:
    book = of_rows(made, 8, 32, 16)

    def chosen(rows: int, *, is_known: bool) -> tuple[int, bool] | None:
        inputs, others = (f"0 float32[{rows}, 4]",), book.active.values()
        found = book.choose(rows if is_known else "another place", inputs, others)
        return None if found is None else (found[0].kind, found[1] is found[0].exact)

    assert chosen(16, is_known=True) == chosen(16, is_known=False) == (16, True)
    assert chosen(9, is_known=True) == (16, False)
    assert chosen(33, is_known=True) is None
    assert book.choose(9, ("0 of no shape",), book.active.values()) is None
    assert book.choose(9, (), ()) is None


def test_the_last_plan_is_known_until_steps_leave_it(made: Plan) -> None:
    book = of_rows(made, 8, 16)
    first, second = book.active.values()
    assert book.latest is first
    book.follow(second)
    assert book.latest is book.following is second
    book.withdraw(16)
    assert book.latest is second
    book.leave(second)
    assert book.latest is first
    assert book.had_plan == {16}


def test_a_kind_is_planned_again_if_its_profile_is_known_and_not_for_ever(made: Plan) -> None:
    book = of_rows(made, 8)
    assert book.why_not_again(8) == REMEDY
    book.profiles[8] = resnet_like(3)
    assert not book.why_not_again(8)
    book.times[8] = MOST_PLANS
    assert book.why_not_again(8) == STILL_GROWS
