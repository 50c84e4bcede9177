"""Bytes that torch's allocator reserves on a GPU for a planned step, by the model of ``caching_allocator.py``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from typing import Literal

from poochplan.errors import UsageError
from poochplan.formats.profile import Kind, Memory, Phase, Profile
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import Schedule, keep_all
from poochplan.planner.simulator.simulate import Candidate
from poochplan.units import parse_budget

from .caching_allocator import peak_reserved
from .packing import Block
from .step_layout import MOST_BLOCKS, Fitting, Laid, StepBlocks, blocks_of

On = Literal["allocated", "reserved"]
MARGIN = 0.05
"""Share of a plan's reserved bytes that should remain free in the budget. Most plans reserve what is predicted, to the
page (benchmarks/pages/gpu.md); a block that comes earlier or later may cost another segment."""
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
NOT_WITHIN = (
    "no plan was found whose reserved bytes are within the budget: this one has the fewest of those looked at, or up "
    "to a tenth more for a shorter step"
)
MORE_FOR_LESS = 0.1
"""If none is within the budget, a plan may reserve this share more than the fewest, for the sake of its step."""
ABOVE = "the policy knows bytes in use alone: what it reserves is above the budget"
NO_MARGIN = f"its reserved bytes fit the budget with a margin of less than {MARGIN:.0%}"


def is_reserved_known(profile: Profile) -> bool:
    """Whether the step was measured on a GPU, with an allocator whose rules the model has: what stays on live bytes has
    none.
    """
    is_measured = profile.device.kind == "cuda" and profile.memory is Memory.ALLOCATED and not profile.roofline
    return is_measured and profile.device.expands is not None


def reserved_peak(problem: Problem, schedule: Schedule, *, is_expandable: bool | None = None) -> int | None:
    """Most reserved bytes of steps under ``schedule`` that begin with an empty cache, without the optimizer's state and
    cuBLAS's workspaces. None if there are more than ``MOST_BLOCKS``. ``is_expandable``: by default as in the profile.
    """
    profile = problem.profile
    is_expandable = bool(profile.device.expands) if is_expandable is None else is_expandable
    blocks = blocks_of(problem, schedule, sums_in_place=True)
    if len(blocks.of_step) > MOST_BLOCKS:
        return None
    of = {
        kind: [one.size_bytes for one in profile.values if one.kind is kind and one.born < 0 and one.size_bytes]
        for kind in (Kind.OPTIMIZER_STATE, Kind.LIBRARY)
    }
    others = Counter(size_bytes for sizes in of.values() for size_bytes in sizes)
    before = list[Block]()
    for block in reversed(blocks.before):  # of equal ones the model's come first
        if others[block.size_bytes] and block.end >= blocks.end:
            others[block.size_bytes] -= 1
        else:
            before.append(block)
    made = [Block(_optimizer_begins(profile, blocks), blocks.end, one) for one in of[Kind.OPTIMIZER_STATE]]
    for size_bytes in of[Kind.LIBRARY]:
        made += [Block(start, blocks.end, size_bytes // 2) for start in _first_products(profile, blocks)]
    before.reverse()
    peak = peak_reserved(before, blocks.of_step, blocks.end, made_by_first=made, is_expandable=is_expandable)
    return peak.reserved_bytes


def _optimizer_begins(profile: Profile, blocks: StepBlocks) -> int:
    """The last time before the optimizer's ops."""
    before = (time for op, time in zip(profile.ops, blocks.op_times, strict=True) if op.phase is not Phase.OPTIMIZER)
    return max(before, default=0)


def _first_products(profile: Profile, blocks: StepBlocks) -> Iterator[int]:
    """When the threads of forward and of backward first multiply matrices: each takes a workspace of cuBLAS's. Without
    such an op, convolutions do.
    """
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        own = [(op.name, time) for op, time in zip(profile.ops, blocks.op_times, strict=True) if op.phase is phase]
        if phase is Phase.BACKWARD:
            own = sorted([*own, *((profile.ops[op].name, time) for time, op in blocks.replay_times)], key=itemgetter(1))
        times = (time for names in (PRODUCTS, "aten.convolution") for name, time in own if name.startswith(names))
        yield next(times, 0)


def covered_bytes(problem: Problem, candidate: Candidate, on: On) -> int:
    """Most bytes of what a budget covers, in the first step or a later one."""
    found = None if on == "allocated" else reserved_peak(problem, candidate.schedule)
    return candidate.peak_bytes if found is None else found


def covers_reserved(on: On | None, *, is_known: bool) -> bool:
    """Whether a budget covers reserved bytes: by default where they are known, as in steps on a GPU."""
    return on == "reserved" or (on is None and is_known)


def budget_on(profile: Profile, on: On | None) -> On:
    """What a budget covers; raises ``UsageError`` if that is not known of the profile."""
    if on not in (None, "allocated", "reserved"):
        raise UsageError(f'on: expected "allocated" or "reserved", found {on!r}')
    if on == "reserved" and not is_reserved_known(profile):
        raise UsageError(
            f'on: expected "allocated" for a profile of {profile.memory} bytes on {profile.device.kind}, where no '
            'allocator reserves any, found "reserved"; leave it out, or profile on a GPU'
        )
    return "reserved" if covers_reserved(on, is_known=is_reserved_known(profile)) else "allocated"


def in_core_bytes(profile: Profile, on: On | None = None) -> int:
    """The in-core peak of what a budget covers, of which shares are."""
    if budget_on(profile, on) == "allocated":
        return profile.in_core_peak_bytes
    problem = Problem.of(profile)
    return reserved_peak(problem, keep_all(problem)) or profile.in_core_peak_bytes


def budget_bytes_of(profile: Profile, budget: str | int | float, on: On | None) -> int:
    """Bytes of a budget: a share is one of the in-core peak of what it covers."""
    return parse_budget(budget, in_core_bytes(profile, on))


class FittingReserved(Fitting):
    """The same for reserved bytes. State: the plan with the fewest of those looked at."""

    unfit, no_room = NOT_WITHIN, NO_MARGIN
    dearest = math.inf
    climb = 0.5

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        super().__init__(problem, budget_bytes)
        self._fewest: tuple[int, Candidate] | None = None

    def _taken(self, candidate: Candidate) -> tuple[int, int, Laid | None]:
        taken_bytes = covered_bytes(self._problem, candidate, "reserved")
        with self._lock:
            best, step_s = self._fewest, candidate.simulation.step_s
            is_fewer = best is None or (taken_bytes, step_s) < (best[0], best[1].simulation.step_s)
            if is_fewer and candidate.peak_bytes <= self._budget_bytes:
                self._fewest = taken_bytes, candidate
        return taken_bytes, int(MARGIN * taken_bytes), None

    def nearest(self, shortest: Candidate) -> Candidate:
        """The plan if none is within the budget: the shortest on bytes in use, unless that reserves many more than the
        fewest; of several with the fewest, the shortest.
        """
        taken_bytes = self._taken(shortest)[0]
        if self._fewest is None:  # each that was looked at has more bytes in use than the budget
            return shortest
        fewest_bytes, fewest = self._fewest
        is_near = shortest.peak_bytes <= self._budget_bytes and taken_bytes <= (1 + MORE_FOR_LESS) * fewest_bytes
        return shortest if is_near else fewest
