"""Plans whose arena fits the budget leave room beside it where they can, and are taken without it where they cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poochplan.errors import InfeasibleError
from poochplan.formats.profile import Profile
from poochplan.planner.arena import packing
from poochplan.planner.arena.fitting import NO_ARENA, NO_ROOM, fitted, room_of
from poochplan.planner.arena.step_layout import layout_of
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.problem.problem import build_problem
from poochplan.planner.writing import Outcome
from poochplan.sessions import packed
from tests.planner.random_profiles import transformer_like
from tests.planner.test_packing_search import UNIT, cut_rectangle

PROFILE = transformer_like(3)
PROBLEM = build_problem(PROFILE)


def greedy(within_bytes: int, profile: Profile = PROFILE) -> Outcome:
    return Outcome(run_policy("greedy", PolicyInput(profile, PROBLEM, within_bytes)), "greedy")


def arena_peak(outcome: Outcome) -> tuple[int, int]:
    """(Peak with the arena, and the room that it should have)."""
    laid = layout_of(PROFILE, PROBLEM, outcome.best.schedule)
    assert laid is not None
    return laid.peak_bytes, room_of(laid)


def loose_budget() -> tuple[int, Outcome]:
    """A budget of which the first search's arena leaves too little, and that outcome."""
    first = greedy(int(0.6 * PROFILE.in_core_peak_bytes))
    peak_bytes, room_bytes = arena_peak(first)
    return peak_bytes + room_bytes // 2, first


def test_a_plan_that_leaves_no_room_is_searched_for_again_with_less() -> None:
    budget_bytes, first = loose_budget()
    asked: list[int] = []

    def search(within_bytes: int, _: float) -> Outcome:
        asked.append(within_bytes)
        return first if len(asked) == 1 else greedy(within_bytes)

    found = fitted(PROFILE, PROBLEM, budget_bytes, search, is_strict=False)
    peak_bytes, room_bytes = arena_peak(found)
    assert len(asked) > 1
    assert asked[1] < first.best.peak_bytes
    assert found.notes == ()
    assert peak_bytes + room_bytes <= budget_bytes
    assert found.laid is not None
    assert found.laid.peak_bytes == peak_bytes


@pytest.mark.parametrize("is_strict", [True, False])
def test_without_a_plan_that_leaves_room_the_one_that_fits_is_taken(is_strict: bool) -> None:
    budget_bytes, first = loose_budget()

    def search(within_bytes: int, _: float) -> Outcome:
        if within_bytes < budget_bytes:
            raise InfeasibleError("none", smallest_budget_bytes=budget_bytes)
        return first

    found = fitted(PROFILE, PROBLEM, budget_bytes, search, is_strict=is_strict)
    assert found.best is first.best
    assert found.laid is not None
    assert found.laid.peak_bytes <= budget_bytes
    assert found.notes == (NO_ROOM,)


def test_a_plan_with_room_whose_step_is_much_longer_is_not_taken() -> None:
    budget_bytes, first = loose_budget()
    slow = greedy(int(0.5 * PROFILE.in_core_peak_bytes))
    longer = replace(slow.best.simulation, step_s=1.5 * first.best.simulation.step_s)
    slow = replace(slow, best=replace(slow.best, simulation=longer))
    assert sum(arena_peak(slow)) <= budget_bytes

    found = fitted(PROFILE, PROBLEM, budget_bytes, lambda b, _: first if b == budget_bytes else slow, is_strict=False)
    assert found.best is first.best
    assert found.notes == (NO_ROOM,)


def test_where_no_arena_fits_the_first_plan_is_taken_and_says_so() -> None:
    first = greedy(int(0.6 * PROFILE.in_core_peak_bytes))
    budget_bytes = arena_peak(first)[0] - 1
    found = fitted(PROFILE, PROBLEM, budget_bytes, lambda *_: first, is_strict=False)
    assert found.best is first.best
    assert found.notes == (NO_ARENA,)


def test_the_smallest_budget_has_a_plan_though_it_holds_no_room() -> None:
    smallest = smallest_budget(PROFILE, arena="on")
    found = plan(PROFILE, smallest, arena="on", evaluations=20)
    assert found.prediction.arena_peak_bytes is not None
    assert found.prediction.arena_peak_bytes <= smallest


def test_a_learned_step_is_searched_for_again_where_its_arena_is_above_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "LOOKS_PER_BLOCK", 0)
    blocks = cut_rectangle(14, 40, 1000, seed=2)
    _, quick_bytes = packed(blocks, 2 * 1000 * UNIT)
    _, bytes_in_room = packed(blocks, 1000 * UNIT)
    assert quick_bytes > bytes_in_room == 1000 * UNIT
    assert packed(blocks, 1000 * UNIT - 1)[1] == quick_bytes, "what no search can give is not searched for"
