"""The error about a budget that holds no arena names the bytes that ``smallest_budget`` does, and these have a plan."""

from __future__ import annotations

import pytest

import poochplan
from poochplan.errors import InfeasibleError
from poochplan.planner.arena.fitting import smallest_arena
from poochplan.planner.problem.problem import build_problem

from .random_profiles import random_profile

NO_SMALLER = 11
"""A step whose arena, everything swapped, is larger than all that it has in-core."""


def test_a_step_whose_arena_is_larger_than_all_it_has_in_core_is_refused_with_what_it_has_in_core() -> None:
    profile = random_profile(NO_SMALLER)
    assert smallest_arena(profile, build_problem(profile)) > profile.in_core_peak_bytes
    assert poochplan.smallest_budget(profile, arena="on") == profile.in_core_peak_bytes


@pytest.mark.parametrize("seed", [NO_SMALLER, 0])
def test_a_byte_less_than_the_smallest_budget_is_refused_by_its_name(seed: int) -> None:
    profile = random_profile(seed)
    smallest = poochplan.smallest_budget(profile, arena="on")
    with pytest.raises(InfeasibleError) as refused:
        poochplan.plan(profile, smallest - 1, arena="on", evaluations=1)
    assert refused.value.smallest_budget_bytes == smallest
    assert poochplan.plan(profile, smallest, arena="on", evaluations=1).budget_bytes == smallest
