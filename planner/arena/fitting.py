"""Fitting: plans whose arena, with what lies outside it, is within the budget, not only what is live.

A search knows live bytes alone. What packing adds is found out afterwards, and the next search has as much less as was
missing. The bound stays that of the first: no plan within the budget has a shorter step, laid out or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from poochplan.errors import InfeasibleError
from poochplan.formats.profile import Profile
from poochplan.planner.judge.candidate import swap_all_on_demand
from poochplan.planner.problem.problem import Problem, build_problem
from poochplan.planner.schedule.schedule import keep_all
from poochplan.planner.writing import KEEP_ALL, Outcome

from .step_layout import Laid, layout_of

HARDER = (1.0, 1.5, 2.5, 4.0, 8.0, 16.0)
"""Further searches have so many times less as was missing: another plan packs otherwise, perhaps no better."""
NO_ARENA = "no plan was found whose arena fits the budget too: its steps are served by the ordinary allocator"
_SHARE = 0.5
"""Of what is left of the effort, for each of the searches."""


def fitted(
    profile: Profile, problem: Problem, budget_bytes: int, search: Callable[[int, float], Outcome], *, is_strict: bool
) -> Outcome:
    """The first outcome of ``search`` (a budget, and the share of the effort) whose arena fits the budget.

    Where none does: if that ``is_strict``, swapping all, whose arena has to; else the first one, with a note. Where
    everything can be kept it is, in an arena or not.
    """
    inner_bytes, first = budget_bytes, search(budget_bytes, _SHARE)
    found = first
    if first.policy == KEEP_ALL:
        return first
    for harder in (*HARDER, None):
        laid = layout_of(profile, problem, found.best.schedule)
        if laid is None or laid.peak_bytes <= budget_bytes:
            return _with_bound_of(first, replace(found, laid=laid))
        if harder is None:
            break
        inner_bytes = min(inner_bytes, found.best.peak_bytes) - int(harder * (laid.peak_bytes - budget_bytes))
        try:
            found = search(inner_bytes, _SHARE)
        except InfeasibleError:
            break
    if is_strict:
        return _with_bound_of(first, replace(found, best=swap_all_on_demand(problem)))
    return replace(first, notes=(*first.notes, NO_ARENA))


def smallest_arena(profile: Profile, problem: Problem) -> int:
    """Bytes of a budget that is sure to have a plan whose arena fits, or that has too many blocks for one."""
    smallest = swap_all_on_demand(problem)
    laid = layout_of(profile, problem, smallest.schedule)
    return max(smallest.peak_bytes, laid.peak_bytes if laid is not None else 0)


def kept_in_arena(profile: Profile) -> Laid | None:
    """Where the blocks lie of the step that keeps everything; None where it has too many for an arena."""
    problem = build_problem(profile)
    return layout_of(profile, problem, keep_all(problem))


def _with_bound_of(first: Outcome, found: Outcome) -> Outcome:
    if first.optimum is None or found.optimum is None or first is found:
        return found
    return replace(found, optimum=replace(found.optimum, bound_s=min(first.optimum.bound_s, found.optimum.bound_s)))
