"""Fitting: plans whose arena, with what lies outside it, is within the budget, not only what is live.

A search knows live bytes alone. What packing adds is found out afterwards, and the next search has as much less as was
missing. The arena should leave room in the budget, since the runtime lays out a step as it was (``ROOM``); the room is
a wish, the budget a promise. The bound stays that of the first: no plan within the budget has a shorter step, laid out
or not.
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
ROOM = 0.005
"""Of the arena: what a budget should hold beside it. A real step's blocks are laid out anew, and differ a little: in 18
plans of six networks a search of at most 0.2 s found an arena that is no more than so much larger than planned."""
FOR_ROOM = 2
"""Searches at most for the room alone, once a plan fits without it."""
DEAREST = 0.02
"""A plan with room may have a step so much longer."""
NO_ARENA = "no plan was found whose arena fits the budget too: its steps are served by the ordinary allocator"
NO_ROOM = "its arena fits the budget with less than 0.5% of room: a step that takes other blocks may need more"
_SHARE = 0.5
"""Of what is left of the effort, for each of the searches."""


def fitted(
    profile: Profile, problem: Problem, budget_bytes: int, search: Callable[[int, float], Outcome], *, is_strict: bool
) -> Outcome:
    """The first outcome of ``search`` (a budget, the share of the effort) whose arena fits the budget with ``ROOM``.

    Where none has the room, or only with a step that is longer by ``DEAREST``: the first that fits without, with a
    note. Where none fits: if that ``is_strict``, swapping all, whose arena has to; else the first one, with a note.
    Where everything can be kept it is, in an arena or not.
    """
    inner_bytes, first = budget_bytes, search(budget_bytes, _SHARE)
    found, tight, for_room = first, None, 0
    if first.policy == KEEP_ALL:
        return first
    for harder in (*HARDER, None):
        laid = layout_of(profile, problem, found.best.schedule)
        missing_bytes = 0 if laid is None else laid.peak_bytes + room_of(laid) - budget_bytes
        if missing_bytes <= 0:
            found = replace(found, laid=laid)
            return _with_bound_of(first, found if tight is None or not _is_dear(found, tight) else tight)
        if tight is None and laid is not None and laid.peak_bytes <= budget_bytes:
            tight = replace(found, laid=laid, notes=(*found.notes, NO_ROOM))
        if harder is None or for_room == FOR_ROOM:
            break
        for_room += tight is not None
        inner_bytes = min(inner_bytes, found.best.peak_bytes) - int(harder * missing_bytes)
        try:
            found = search(inner_bytes, _SHARE)
        except InfeasibleError:
            break
    if tight is not None:
        return _with_bound_of(first, tight)
    if is_strict:
        return _with_bound_of(first, replace(found, best=swap_all_on_demand(problem)))
    return replace(first, notes=(*first.notes, NO_ARENA))


def room_of(laid: Laid) -> int:
    """Bytes that a budget should hold beside the arena."""
    return int(ROOM * laid.layout.arena_bytes)


def _is_dear(found: Outcome, tight: Outcome) -> bool:
    return found.best.simulation.step_s > (1 + DEAREST) * tight.best.simulation.step_s


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
    """``found``, with the bound of the search for the whole budget: the others proved theirs for smaller ones."""
    if first.optimum is None or found.optimum is None or first is found:
        return found
    bound_s = min(first.optimum.bound_s, found.best.simulation.step_s)
    return replace(found, optimum=replace(found.optimum, bound_s=bound_s))
