"""PoocH: keep against swap first, then recompute against swap, both by simulation."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice

from poochplan.formats.occupancy import Ints
from poochplan.formats.plan import Decision
from poochplan.planner.simulator.evaluator import Evaluation
from poochplan.planner.simulator.schedule import Style
from poochplan.planner.simulator.simulate import Candidate, swap_all, swap_all_on_demand, try_style

from .registry import PolicyInput, policy

KEEP_SETS = 150
"""Most sets of kept values that the first search simulates."""
FLIP_GROUPS = 200
"""Most flips to try. On longer steps, values of about the same r(X) are flipped together."""
FLIP_EVALUATIONS = 500
"""Most flips to recompute that the second search simulates."""


@policy("pooch")
def run_pooch(given: PolicyInput) -> Candidate:
    """The two searches of Ito et al., Profiling based Out-of-core Hybrid Method, PPoPP 2019, by simulation; details are
    reconstructed.

    1. A step that swaps everything is simulated. ``L_I`` and ``L_O`` are the values whose copy in, or out, the step
       waits for. Sets of values of ``L_I`` that fit the budget, and to which none can be added, are tried: first the
       set filled from the output side, then those without one of its values, without two, and so on,
       :data:`KEEP_SETS` in all. Values of ``L_O`` fill the rest of the budget, from the output side. The fastest wins.
    2. Recomputing a swapped value X removes swap overhead and adds seconds; r(X) is their ratio, by simulation. The X
       with the largest r(X) is flipped while the step gets faster and fits. r(X) is evaluated only if its bound (from
       all of X's seconds on the link) is the largest, at most :data:`FLIP_EVALUATIONS` times. On long steps, X is one
       of :data:`FLIP_GROUPS` groups of values.
    """
    kept = _search_keeps(given)
    flipped = _flip_to_recompute(given, kept)
    return min(given.candidate(flipped.wish), given.candidate(kept.wish), key=given.rank)


@dataclass(frozen=True, eq=False)
class _Tried:
    """Decisions and their simulation."""

    wish: tuple[Decision, ...]
    actual: tuple[Decision, ...]
    """The decisions of the schedule, which keeps values that it need not release."""
    found: Evaluation

    def rank(self, budget_bytes: int) -> tuple[int, float, int]:
        """Like :meth:`Candidate.rank`."""
        return max(0, self.found.peak_bytes - budget_bytes), self.found.step_s, self.found.moved_bytes


def _tried(given: PolicyInput, wish: Sequence[Decision]) -> _Tried:
    found = given.evaluator.evaluate(wish, given.budget_bytes, Style())
    return _Tried(tuple(wish), given.evaluator.decisions, found)


def _search_keeps(given: PolicyInput) -> _Tried:
    problem = given.problem
    start = try_style(problem, "", swap_all(problem), given.budget_bytes, Style())
    waits = start.simulation.waits
    waited_in = list(dict.fromkeys(wait.value for wait in waits if not wait.is_out))
    waited_in.sort(key=lambda value: int(problem.first_use[value]))
    waited_out = list(dict.fromkeys(wait.value for wait in waits if wait.is_out))
    waited_out.sort(key=lambda value: -int(problem.save_tick[value]))
    free_bytes: Ints = given.budget_bytes - swap_all_on_demand(problem).simulation.memory_bytes
    best = _tried(given, start.wish)
    tried: set[frozenset[int]] = set()
    filled = _filled(given, free_bytes, waited_in)
    rest = [value for value in waited_in if value not in filled]
    order = [*reversed(filled), *rest]
    subsets = chain.from_iterable(combinations(order, count) for count in range(len(order) + 1))  # small ones first
    for skipped in islice(subsets, KEEP_SETS):
        unskipped = [value for value in waited_in if value not in skipped]
        kept = frozenset(_filled(given, free_bytes, unskipped + waited_out))
        if kept not in tried:
            tried.add(kept)
            swapped = [value for value in given.movable if value not in kept]
            found = _tried(given, given.wish(swap=swapped))
            best = min(best, found, key=lambda tried: tried.rank(given.budget_bytes))
        if given.is_over:
            break
    return best


def _filled(given: PolicyInput, free_bytes: Ints, values: Iterable[int]) -> list[int]:
    """Those of the values, in order, that can be kept within the bytes that are free at each tick."""
    free_bytes = free_bytes.copy()
    kept: list[int] = []
    for value in dict.fromkeys(values):
        first, until = given.away(value)
        absent, size_bytes = free_bytes[first:until], given.problem.rounded_bytes[value]
        if not len(absent) or int(absent.min()) >= size_bytes:
            absent -= size_bytes
            kept.append(value)
    return kept


def _flip_to_recompute(given: PolicyInput, start: _Tried) -> _Tried:
    """Step 2: flips swaps to recomputes, the largest r(X) first, until no flip makes the step faster."""
    best, flips, problem, bounds = start, 0, given.problem, list[tuple[float, int]]()
    for value in given.replayable:
        link_s = problem.out_seconds(value) + problem.in_seconds(value)
        bound = link_s / max(problem.replay.of(value).seconds, 1e-12)  # of r(X), from all seconds on the link
        if start.actual[value] is Decision.SWAP and bound > 1:
            bounds.append((-bound, value))
    bounds.sort()
    together = max(1, -(-len(bounds) // FLIP_GROUPS))
    groups = [bounds[first : first + together] for first in range(0, len(bounds), together)]
    waiting = [(group[0][0], tuple(value for _, value in group), -1) for group in groups]
    known: dict[tuple[int, ...], _Tried] = {}
    without_gain: list[tuple[float, tuple[int, ...], int]] = []
    evaluations = 0
    while waiting and evaluations < FLIP_EVALUATIONS and not given.is_over:
        entry = heapq.heappop(waiting)
        values = entry[1]
        if entry[2] < flips:
            wish = list(best.wish)
            for value in values:
                wish[value] = Decision.RECOMPUTE
            known[values] = _tried(given, wish)
            evaluations += 1
            added_s = known[values].found.replay_s - best.found.replay_s
            removed_s = best.found.step_s - known[values].found.step_s + added_s
            heapq.heappush(waiting, (-removed_s / max(added_s, 1e-12), values, flips))
        elif known[values].rank(given.budget_bytes)[:2] < best.rank(given.budget_bytes)[:2]:
            best, flips = known[values], flips + 1
            for again in without_gain:
                heapq.heappush(waiting, again)
            without_gain.clear()
        else:
            without_gain.append(entry)
    return best
