"""Plans whose arena fits the budget leave room beside it where they can, and are taken without it where they cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from poochplan.formats.plan import Decision, Plan, SolveStatus
from poochplan.formats.profile import Memory
from poochplan.planner.arena import packing, step_layout
from poochplan.planner.arena.step_layout import HOPELESS, NO_ARENA, NO_ROOM, ROOM, Fitting, layout_of, smallest_arena
from poochplan.planner.planning import plan, smallest_budget
from poochplan.planner.policies import PolicyInput, run_policy
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Style
from poochplan.planner.simulator.simulate import Candidate, swap_all_on_demand, try_style
from poochplan.sessions import packed
from tests.planner.random_profiles import random_profile, transformer_like, unet_like
from tests.planner.test_packing import UNIT, cut_rectangle

PROFILE = transformer_like(3)
PROBLEM = Problem.of(PROFILE)
PROFILES = {"gpt": PROFILE, "unet": unet_like(3)}


def greedy(share: float) -> Candidate:
    return run_policy("greedy", PolicyInput(PROBLEM, int(share * PROFILE.in_core_peak_bytes)))


def taken_bytes(candidate: Candidate) -> int:
    """What its arena takes, and what lies outside it."""
    laid = layout_of(PROBLEM, candidate.schedule)
    assert laid is not None
    return laid.peak_bytes


def slowed(candidate: Candidate, factor: float) -> Candidate:
    """The same plan with a longer step."""
    longer = replace(candidate.simulation, step_s=factor * candidate.simulation.step_s)
    return replace(candidate, simulation=longer)


# -- what the search makes of it -------------------------------------------------------------------


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("share", ["75%", "85%"])
def test_the_arena_fits_the_budget_with_room(name: str, share: str) -> None:
    found = plan(PROFILES[name], share, arena="on", evaluations=2000)
    assert found.prediction.arena_peak_bytes is not None
    assert found.prediction.arena_bytes is not None
    assert found.prediction.arena_peak_bytes + int(ROOM * found.prediction.arena_bytes) <= found.budget_bytes
    assert not {NO_ROOM, NO_ARENA} & set(found.notes)


@pytest.mark.parametrize("name", PROFILES)
def test_the_bound_is_that_of_the_whole_budget_and_holds_for_plans_without_an_arena(name: str) -> None:
    within, without = (plan(PROFILES[name], "75%", arena=arena, evaluations=2000) for arena in ("on", "off"))
    assert within.solve.bound_s is not None
    assert within.solve.bound_s <= without.prediction.step_s * (1 + 1e-9)
    assert without.prediction.arena_peak_bytes is None


def test_the_smallest_budget_has_a_plan_though_it_holds_no_room() -> None:
    smallest = smallest_budget(PROFILE, arena="on")
    found = plan(PROFILE, smallest, arena="on", evaluations=20)
    assert found.prediction.arena_peak_bytes is not None
    assert found.prediction.arena_peak_bytes <= smallest


@pytest.mark.parametrize("evaluations", [1, 20, 200])
def test_where_no_arena_fits_the_plan_is_within_its_peak_and_says_so(
    monkeypatch: pytest.MonkeyPatch, evaluations: int
) -> None:
    found = where_no_arena_fits(monkeypatch, evaluations=evaluations)
    smallest = smallest_budget(PROFILE, arena="off")
    assert smallest_arena(PROBLEM) > smallest
    assert found.prediction.peak_bytes <= smallest


def where_no_arena_fits(monkeypatch: pytest.MonkeyPatch, unserved_step_s: float | None = None, **options: Any) -> Plan:
    monkeypatch.setattr(step_layout, "LOOKS_PER_BLOCK", 0)  # packs badly
    times = msgspec.structs.replace(PROFILE.times, unserved_step_s=unserved_step_s)
    device = msgspec.structs.replace(PROFILE.device, kind="cpu")
    profile = msgspec.structs.replace(PROFILE, memory=Memory.ALLOCATED, device=device, times=times)
    found = plan(profile, smallest_budget(PROFILE, arena="off"), **options)
    assert NO_ARENA in found.notes
    return found


@pytest.mark.parametrize(("ratio", "gap"), [(0.5, None), (2.0, None), (0.5, 0.5), (1.0, 0.5), (2.0, 0.5)])
def test_the_bound_and_the_gap_hold_however_long_steps_without_an_arena_take(
    monkeypatch: pytest.MonkeyPatch, ratio: float, gap: float | None
) -> None:
    asked = {} if gap is None else {"gap": gap}
    found = where_no_arena_fits(monkeypatch, ratio * PROFILE.times.step_s, evaluations=200, **asked)
    solve = found.solve
    assert solve.bound_s is not None
    assert solve.bound_s <= found.prediction.step_s * (1 + 1e-9)
    assert solve.gap is not None
    assert gap is None or (solve.status is SolveStatus.WITHIN_GAP) == (solve.gap <= gap)


# -- what is learned from a plan that was packed ----------------------------------------------------


def test_a_plan_whose_arena_does_not_fit_leaves_the_next_ones_as_many_bytes_less() -> None:
    first = greedy(0.6)
    judge = Fitting(PROBLEM, taken_bytes(first) - UNIT)
    needed_bytes = judge.pack(first)
    assert needed_bytes > taken_bytes(first) - UNIT
    assert judge.within_bytes < first.peak_bytes
    assert judge.chosen() is None


def test_a_plan_that_fits_lets_the_next_ones_have_more() -> None:
    first = greedy(0.6)
    judge = Fitting(PROBLEM, int(1.05 * taken_bytes(first)))
    assert judge.pack(first) <= int(1.05 * taken_bytes(first))
    assert judge.within_bytes > first.peak_bytes
    chosen = judge.chosen()
    assert chosen is not None
    assert (chosen.candidate, chosen.note) == (first, "")


def test_without_a_plan_that_leaves_room_the_one_that_fits_is_taken_and_so_it_is_where_room_is_dear() -> None:
    first = greedy(0.6)
    judge = Fitting(PROBLEM, int((1 + ROOM / 2) * taken_bytes(first)))
    judge.pack(first)
    chosen = judge.chosen()
    assert chosen is not None
    assert (chosen.candidate, chosen.note) == (first, NO_ROOM)
    judge.pack(slowed(greedy(0.5), 1.5))
    assert judge.chosen() is chosen
    cheap = slowed(greedy(0.5), first.simulation.step_s / greedy(0.5).simulation.step_s)
    judge.pack(cheap)
    assert judge.chosen() is not None
    assert judge.chosen() is not chosen


def test_plans_of_the_fewest_live_bytes_are_packed_so_often_and_then_no_arena_is_asked_for() -> None:
    least = swap_all_on_demand(PROBLEM)
    judge = Fitting(PROBLEM, taken_bytes(least) - UNIT)
    for _ in range(2 * HOPELESS - 1):
        judge.pack(least)
    assert not judge.is_hopeless
    for _ in range(2):
        judge.pack(least)
    assert judge.within_bytes == least.peak_bytes
    assert judge.is_hopeless
    assert step_layout.CLIMB < ROOM  # a plan that fits does not lead away from those that do


@pytest.mark.usefixtures("compiled_evaluator")
def test_a_learned_step_is_searched_for_again_where_its_arena_is_above_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "LOOKS_PER_BLOCK", 0)
    blocks = cut_rectangle(14, 40, 1000, seed=2)
    _, quick_bytes = packed(blocks, 2 * 1000 * UNIT)
    _, bytes_in_room = packed(blocks, 1000 * UNIT)
    assert quick_bytes > bytes_in_room == 1000 * UNIT
    assert packed(blocks, 1000 * UNIT - 1)[1] == quick_bytes, "what no search can give is not searched for"


# -- the smallest budget ------------------------------------------------------------

NO_SMALLER = 11
"""A step whose arena, everything swapped, is larger than all that it has in-core."""


def test_a_step_whose_arena_is_larger_than_all_it_has_in_core_is_refused_with_what_it_has_in_core() -> None:
    profile = random_profile(NO_SMALLER)
    assert smallest_arena(Problem.of(profile)) > profile.in_core_peak_bytes
    assert smallest_budget(profile, arena="on") == profile.in_core_peak_bytes


@pytest.mark.parametrize("wish", [Decision.RECOMPUTE, Decision.SWAP])
def test_a_plan_that_recomputes_has_room_for_a_generators_state_beside_its_arena_and_no_other_has(
    wish: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = [Decision.KEEP if replay is None else wish for replay in PROBLEM.replay.replays]
    candidate = try_style(PROBLEM, "", wishes, int(0.6 * PROFILE.in_core_peak_bytes), Style())
    assert wish in candidate.schedule.decisions
    with_room_bytes = taken_bytes(candidate)
    monkeypatch.setattr(step_layout, "GENERATOR_STATE_BYTES", 0)
    assert with_room_bytes - taken_bytes(candidate) == (5120 if wish is Decision.RECOMPUTE else 0)
