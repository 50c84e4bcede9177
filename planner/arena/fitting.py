"""Fitting: plans for which the arena and the memory outside it are within the budget, and not only the live bytes.

Walks know live bytes alone. A plan that would become the best one is packed before it is accepted. The bytes that
packing added are subtracted from the live bytes that the next plans may have. The arena should leave room in the
budget, because the runtime lays out a real step (``ROOM``). The room is a preference; the budget is a limit.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from poochplan.formats.profile import Profile
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.schedule import keep_all
from poochplan.planner.simulator.simulate import Candidate, swap_all_on_demand

from .step_layout import Laid, layout_of

ROOM = 0.005
"""Share of the arena that should remain free in the budget. A real step's blocks are laid out again, and differ a
little. In 18 plans of six networks, a search of at most 0.2 s found an arena that exceeded the planned one by at most
this share."""
DEAREST = 0.02
"""A plan with room may have a step that is longer by this share."""
CLIMB = 0.0025
"""Share of the budget by which the next plans may have more live bytes once one fits."""
HOPELESS = 8
"""After this many plans with the fewest live bytes whose arena does not fit, no room is requested; after as many again,
no arena."""
NO_ARENA = "no plan was found whose arena fits the budget too: its steps are served by the ordinary allocator"
NO_ROOM = "its arena fits the budget with less than 0.5% of room: a step that takes other blocks may need more"


@dataclass(frozen=True, eq=False)
class Packed:
    """A plan whose arena fits the budget."""

    candidate: Candidate
    laid: Laid | None
    """None if it has too many blocks to be laid out."""
    note: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of the simulated step."""
        return self.candidate.simulation.step_s


class Fitting:
    """State: the best packed plans, and what the last one shows about the next. Any thread may use it."""

    def __init__(self, profile: Profile, problem: Problem, budget_bytes: int) -> None:
        self._profile, self._problem, self._budget_bytes = profile, problem, budget_bytes
        self._least_bytes = swap_all_on_demand(problem).peak_bytes
        self.within_bytes = max(self._least_bytes, int(budget_bytes / (1 + ROOM)))
        """Live bytes with which an arena is expected to fit."""
        self._lock = threading.Lock()
        self._shortest: dict[str, Packed] = {}
        """By note: the shortest plan whose arena leaves room, and the shortest whose arena does not."""
        self._failed = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether apparently no arena fits."""
        return self._failed >= 2 * HOPELESS and not self._shortest

    def pack(self, candidate: Candidate) -> int:
        """Bytes of a budget that holds the plan's arena, the memory outside it, and room. Remembers a plan that
        fits.
        """
        laid = layout_of(self._profile, self._problem, candidate.schedule, enough_bytes=self._budget_bytes, room=ROOM)
        taken_bytes = candidate.peak_bytes if laid is None else laid.peak_bytes
        with_room_bytes = taken_bytes + (int(ROOM * laid.layout.arena_bytes) if laid is not None else 0)
        packed = Packed(candidate, laid, "" if with_room_bytes <= self._budget_bytes else NO_ROOM)
        with self._lock:
            shortest = self._shortest.get(packed.note)
            if taken_bytes <= self._budget_bytes and (shortest is None or packed.step_s < shortest.step_s):
                self._shortest[packed.note] = packed
            needed_bytes = with_room_bytes if self._failed < HOPELESS else taken_bytes
            self._learn(candidate.peak_bytes, needed_bytes)
        return needed_bytes

    def _learn(self, peak_bytes: int, needed_bytes: int) -> None:
        """Learns from a plan with that many live bytes how many the next plans may have."""
        if needed_bytes <= self._budget_bytes:
            most_bytes = peak_bytes + int(CLIMB * self._budget_bytes)
            self.within_bytes = min(self._budget_bytes, max(self.within_bytes, most_bytes))
            return
        self._failed += self.within_bytes == self._least_bytes
        fewer_bytes = peak_bytes - (needed_bytes - self._budget_bytes)
        self.within_bytes = max(self._least_bytes, min(self.within_bytes, fewer_bytes))

    def chosen(self) -> Packed | None:
        """The shortest step among plans whose arena leaves room. If there is none, or it is too slow, among the
        others.
        """
        best, tight = self._shortest.get(""), self._shortest.get(NO_ROOM)
        if best is None or tight is None:
            return best or tight
        return tight if best.step_s > (1 + DEAREST) * tight.step_s else best


def smallest_arena(profile: Profile, problem: Problem) -> int:
    """Bytes of a budget that certainly has a plan whose arena fits, or a plan with too many blocks for an arena."""
    smallest = swap_all_on_demand(problem)
    laid = layout_of(profile, problem, smallest.schedule)
    return max(smallest.peak_bytes, laid.peak_bytes if laid is not None else 0)


def kept_in_arena(profile: Profile) -> Laid | None:
    """The layout of the step that keeps everything; None if it has too many blocks for an arena."""
    problem = build_problem(profile)
    return layout_of(profile, problem, keep_all(problem))
