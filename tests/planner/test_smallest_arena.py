"""The error about a budget that holds no arena names the bytes that ``smallest_budget`` does, and these have a plan."""

from __future__ import annotations

import pytest

import poochplan
from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Decision
from poochplan.planner.arena import step_layout
from poochplan.planner.arena.step_layout import layout_of, smallest_arena
from poochplan.planner.simulator.construct import fit
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.schedule import Style

from .random_profiles import random_profile, transformer_like

NO_SMALLER = 11
"""A step whose arena, everything swapped, is larger than all that it has in-core."""


def test_a_step_whose_arena_is_larger_than_all_it_has_in_core_is_refused_with_what_it_has_in_core() -> None:
    profile = random_profile(NO_SMALLER)
    assert smallest_arena(profile, build_problem(profile)) > profile.in_core_peak_bytes
    assert poochplan.smallest_budget(profile, arena="on") == profile.in_core_peak_bytes


@pytest.mark.parametrize("wish", [Decision.RECOMPUTE, Decision.SWAP])
def test_a_plan_that_recomputes_has_room_for_a_generators_state_beside_its_arena_and_no_other_has(
    wish: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = transformer_like(3)
    problem = build_problem(profile)
    wishes = [Decision.KEEP if replay is None else wish for replay in problem.replay.replays]
    schedule = fit(problem, wishes, int(0.6 * profile.in_core_peak_bytes), Style())
    assert wish in schedule.decisions
    with_room = layout_of(profile, problem, schedule)
    monkeypatch.setattr(step_layout, "GENERATOR_STATE_BYTES", 0)
    without = layout_of(profile, problem, schedule)
    assert with_room is not None
    assert without is not None
    assert with_room.peak_bytes - without.peak_bytes == (5120 if wish is Decision.RECOMPUTE else 0)


@pytest.mark.parametrize("seed", [NO_SMALLER, 0])
def test_a_byte_less_than_the_smallest_budget_is_refused_by_its_name(seed: int) -> None:
    profile = random_profile(seed)
    smallest = poochplan.smallest_budget(profile, arena="on")
    with pytest.raises(InfeasibleError) as refused:
        poochplan.plan(profile, smallest - 1, arena="on", evaluations=1)
    assert refused.value.smallest_budget_bytes == smallest
    assert poochplan.plan(profile, smallest, arena="on", evaluations=1).budget_bytes == smallest
