"""How much optimizer state is streamed: decided together with the activations, under one budget.

The search of activations (``optimise.py``) knows one step. Here it is called for several counts of streamed chunks: for
the least that any plan needs, for the least with which everything else stays, and between the best count so far and its
neighbours. Each search begins with the decisions of the counts beside it. A long one at the best count follows.

**Bounds.** Where some chunks are streamed, more of them take no more bytes at any tick. They make the optimizer's last
op longer, and no copy waits for what is behind the step's points. So what is proven of a count holds, less the
difference of these seconds, for every smaller one but none. The least bound of all counts is the bound of the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from typing import Protocol

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Decision, SolveStatus, StateChunk
from poochplan.formats.profile import Phase
from poochplan.planner.arena.reserved import NOT_WITHIN
from poochplan.planner.arena.step_layout import NO_ARENA
from poochplan.planner.search.allowance import EVALUATIONS_PER_SOLVE, Progress, SearchCallback, SearchLimits
from poochplan.planner.search.bound import lower_bound
from poochplan.planner.search.optimise import BUILD_SHARE, Optimum
from poochplan.planner.search.solvers import choose_solver
from poochplan.planner.simulator.evaluator import library
from poochplan.planner.simulator.optimizer_state import added_seconds, chunks_of, streamed, streamed_bytes
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import keep_all
from poochplan.planner.simulator.simulate import simulated, swap_all_on_demand

SHORT_SHARE = 0.06
"""Share of the allowance of each short search."""
PLAIN_SHARE = 0.2
"""The same without streamed state, if a plan may do without: no plan is to be worse than that one."""
SHORT_SEARCHES = 4
"""Most short searches before the long one."""
EXPLORE_SHARE = 0.5
"""Share of the allowance after which the long search begins."""
AGAIN_SHARE, LONG_SHARE = 0.3, 0.7
"""Shares of the rest of a second search without streamed state, if it might still be better, and of the long search."""
PROOF_SHARE = 0.5
"""Share of the rest that the bound of one count may take."""
CLOSE_SHARE = 0.6
"""Share of the rest of each search after the long one."""
ENDED_EARLY = (SolveStatus.TIME_LIMIT, SolveStatus.EVALUATION_LIMIT, SolveStatus.INTERRUPTED)
STARTS = 2
"""A search begins with the decisions of this many other counts."""


class Search(Protocol):
    """Finds the best plan for a step with some state streamed; ``starts`` are decisions to begin with."""

    def __call__(
        self,
        step: Problem,
        effort: SearchLimits,
        watch: SearchCallback | None,
        starts: Sequence[Sequence[Decision]],
    ) -> Optimum: ...


class Streaming:
    """A step by the number of its chunks that are streamed. ``host_bytes`` is the most that the host may hold."""

    def __init__(self, problem: Problem, host_bytes: int | None = None) -> None:
        self.problem, self.chunks = problem, chunks_of(problem.measured)
        self.host_bytes = inf if host_bytes is None else host_bytes
        self.most = max(n for n in range(len(self.chunks) + 1) if streamed_bytes(self.state(n)) <= self.host_bytes)
        self.step = cache(self._step)
        """The step that streams that many chunks."""
        self.smallest = cache(lambda count: swap_all_on_demand(self.step(count)))
        """The plan with the least peak that streams that many chunks."""

    @property
    def is_behind(self) -> bool:
        """Whether the optimizer's last op is behind all points of the step."""
        profile = self.problem.measured
        last = max((place for place, op in enumerate(profile.ops) if op.phase is Phase.OPTIMIZER), default=-1)
        return last < 0 or profile.points[-1].op <= last

    def added_s(self, count: int) -> float:
        """Seconds by which streaming that many chunks makes the step longer."""
        return added_seconds(self.problem.measured, self.state(count))

    def state(self, count: int) -> tuple[StateChunk, ...]:
        return streamed(self.chunks, count)

    def _step(self, count: int) -> Problem:
        return self.problem.with_state(self.state(count))

    def fewest(self, budget_bytes: int) -> int | None:
        """The fewest chunks with which a plan fits; None if none does. More of them never take more bytes."""
        return self._least(lambda count: self.smallest(count).peak_bytes <= budget_bytes)

    def fewest_kept(self, budget_bytes: int) -> int | None:
        """The fewest with which everything else may stay."""
        return self._least(
            lambda count: simulated(self.step(count), "", keep_all(self.step(count))).peak_bytes <= budget_bytes
        )

    def _least(self, fits: Callable[[int], bool]) -> int | None:
        low, high = 0, self.most
        if not fits(high):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return low


def optimise_streaming(
    steps: Streaming, budget_bytes: int, effort: SearchLimits, search: Search, watch: SearchCallback | None
) -> tuple[Problem, Optimum]:
    """The step, with some state streamed, and the plan for it with the least simulated step that was found.

    ``steps`` has a count with which a plan fits. Raises ``InfeasibleError`` if no plan within the host's memory was
    found.
    """
    found = _Counts(steps, budget_bytes, effort, search, watch)
    found.run()
    return found.chosen()


class _Counts:
    """State: the best plan of each count that was searched for, and what is proven of each."""

    def __init__(
        self, steps: Streaming, budget_bytes: int, effort: SearchLimits, search: Search, watch: SearchCallback | None
    ) -> None:
        self.steps, self.budget_bytes, self.effort = steps, budget_bytes, effort
        self.search, self.watch = search, watch
        self.whole, self.solver = effort.allowance(), choose_solver(effort.solver)
        first = steps.fewest(budget_bytes)
        assert first is not None, "the caller has checked that"
        self.counts = range(first, steps.most + 1)
        self.added_s = [steps.added_s(count) for count in range(steps.most + 1)]
        self.found = dict[int, Optimum]()
        self.proven_s = dict[int, float]()
        """By count, what a search or the relaxation has proven of it beyond the seconds of its ops."""
        self.tried = set[int]()
        """Counts of which the relaxation was solved, or could not be in time."""
        self.closed = set[int]()
        """Counts that were searched for, or would hold no plan."""
        self.too_short_s = 0.0
        """So many seconds have proven nothing of a count: the relaxation of a large step takes longer."""
        self.searches = Counter[int]()
        """By count: how often it was searched for."""
        self.refusal: InfeasibleError | None = None

    def run(self) -> None:
        try:
            self._run()
        except KeyboardInterrupt:
            if not (self.effort.keeps_interrupted and self.found):
                raise
            self.whole.stop()

    def _run(self) -> None:
        if not self.whole.is_counted:
            library(BUILD_SHARE * self.effort.time_limit_s)
        kept, first = self.steps.fewest_kept(self.budget_bytes), self.counts[0]
        if kept is not None:
            self._look(kept)  # often at once: nothing is left to decide
        self._look(first, PLAIN_SHARE if first == 0 else SHORT_SHARE)
        explored = self.whole.part(EXPLORE_SHARE)
        for _ in range(SHORT_SEARCHES):
            count = self._between()
            if count is None or explored.is_spent:
                break
            self._look(count)
        self._search_long(LONG_SHARE)
        self._close()
        self._search_long(1.0)

    def chosen(self) -> tuple[Problem, Optimum]:
        if not self.found:
            assert self.refusal is not None
            raise self.refusal
        found, bound_s = self.found[self.best], min(map(self.bound_s, self.counts))
        status = found.status if found.status in ENDED_EARLY else self.whole.status
        if found.best.simulation.step_s <= bound_s * (1 + self.effort.gap):
            status = SolveStatus.WITHIN_GAP
        rounds = len(self.tried - self.found.keys()) + sum(one.rounds for one in self.found.values())
        found = replace(found, bound_s=bound_s, status=status, rounds=rounds, solver=self.solver)
        return self.steps.step(self.best), replace(found, evaluations=self.effort.evaluations, seed=self.effort.seed)

    # -- how far it is ------------------------------------------------------------------------------------------------

    @property
    def best(self) -> int:
        return min(self.found, key=lambda count: (_is_unfit(self.found[count]), self._step_s(count), count))

    @property
    def step_s(self) -> float:
        """Of the best plan that fits; infinite before there is one."""
        fit = (self._step_s(count) for count, found in self.found.items() if not _is_unfit(found))
        return min(fit, default=inf)

    def _step_s(self, count: int) -> float:
        return self.found[count].best.simulation.step_s

    def bound_s(self, count: int) -> float:
        """No plan with that count within the budget has a shorter step."""
        added_s, known = self.added_s, self.proven_s.items()
        above = (bound_s - added_s[more] for more, bound_s in known if more >= count > 0 and self.steps.is_behind)
        least_s = max([self.steps.problem.step_s, *above]) + added_s[count]
        return max(least_s, self.steps.problem.keep_all_s, self.proven_s.get(count, 0.0))

    def _low(self) -> list[int]:
        """The counts of which it is not proven that no plan is better by more than the gap."""
        enough_s = self.step_s / (1 + self.effort.gap)
        return [count for count in self.counts if self.bound_s(count) < enough_s]

    # -- which count is next ------------------------------------------------------------------------------------------

    def _is_hopeless(self, count: int) -> bool:
        """Whether a search for it, or for more chunks, found no plan that fits in all that the budget covers."""
        return count in self.closed and (count not in self.found or _is_unfit(self.found[count]))

    def _between(self) -> int | None:
        """A count between the best one and its neighbours among those that were searched for."""
        if not self.found:
            return next((count for count in reversed(self.counts) if count not in self.closed), None)
        best, low = self.best, set(self._low())
        below = max((count for count in self.found if count < best), default=-1)
        above = min((count for count in self.found if count > best), default=self.steps.most + 1)
        sides = (range(below + 1, best), range(best + 1, above))
        open_ones = [[count for count in side if count in low and count not in self.closed] for side in sides]
        most = max(open_ones, key=len)
        return most[len(most) // 2] if most else None

    def _close(self) -> None:
        """Searches once more for the most promising of the other counts. Then raises the bounds of those that may still
        hold a better plan, and searches for each that does not drop out by that.
        """
        is_first = True
        while not self.whole.is_spent:
            low = self._low()
            has_time = self.whole.is_counted or PROOF_SHARE * self.whole.left > self.too_short_s
            unproven = [count for count in low if count not in self.tried and has_time]
            others = (count for count in low if not self.found or count != self.best)
            again = [count for count in others if self.searches[count] < 2 and not self._is_hopeless(count)]
            if again and (is_first or not unproven):
                self._search(min(again, key=self.bound_s), CLOSE_SHARE * self.whole.left)
            elif unproven:
                self._prove(unproven[len(unproven) // 2])
            else:
                return
            is_first = False

    def _prove(self, count: int) -> None:
        limits = self.whole.part(PROOF_SHARE).limits()
        self.whole.spend(EVALUATIONS_PER_SOLVE)
        self._learn(count, lower_bound(self.steps.step(count), self.budget_bytes, self.solver, limits))
        self.tried.add(count)

    def _learn(self, count: int, bound_s: float) -> None:
        self.proven_s[count] = max(self.proven_s.get(count, 0.0), bound_s)
        if bound_s > self.steps.step(count).keep_all_s:
            self.tried.add(count)

    # -- searches -----------------------------------------------------------------------------------------------------

    def _look(self, count: int, share: float = SHORT_SHARE) -> None:
        """A short search, unless there was one."""
        if count not in self.closed:
            self._search(count, share * (self.effort.evaluations or self.effort.time_limit_s))

    def _search_long(self, share: float) -> None:
        """Spends a share of the rest at the best count, after another look at none if that might be as good."""
        if self.found and self.best and 0 in self.found and 0 in self._low():
            self._search(0, AGAIN_SHARE * share * self.whole.left)
        if self.found and self.best in self._low():
            self._search(self.best, share * self.whole.left)

    def _search(self, count: int, spends: float) -> None:
        """``spends``: seconds, or simulations if these are counted."""
        if self.whole.is_spent:
            return
        limits, nearest = self._limits(count, spends), sorted(self.found, key=lambda other: abs(other - count))
        starts = [self.found[other].best.wish for other in nearest[:STARTS]]
        self.closed.add(count)
        self.searches[count] += 1
        try:
            found = self.search(self.steps.step(count), limits, self._watch_for(count), starts)
        except InfeasibleError as error:
            self.refusal = error
            return
        if limits.evaluations is not None and found.status is not SolveStatus.NOT_NEEDED:
            self.whole.spend(limits.evaluations)
        kept_s = self.steps.step(count).keep_all_s
        self._learn(count, kept_s if found.status is SolveStatus.NOT_NEEDED else found.bound_s or 0.0)
        if count not in self.tried and found.status in ENDED_EARLY:
            self.too_short_s = max(self.too_short_s, spends)
        if found.status is SolveStatus.INTERRUPTED:
            self.whole.stop()
        before = self.found.get(count, found)
        self.found[count] = min(before, found, key=lambda one: (_is_unfit(one), one.best.simulation.step_s))
        if _is_unfit(self.found[count]):
            self.closed.update(range(count))  # fewer chunks leave even less

    def _limits(self, count: int, spends: float) -> SearchLimits:
        """What one search may take, within the rest, and within what the host has left."""
        effort, spends = self.effort, max(0.0, min(spends, self.whole.left))
        if effort.host_bytes is not None:
            effort = replace(effort, host_bytes=effort.host_bytes - streamed_bytes(self.steps.state(count)))
        if effort.evaluations is not None:
            return replace(effort, evaluations=max(1, int(spends)))
        return replace(effort, time_limit_s=spends)

    def _watch_for(self, count: int) -> SearchCallback | None:
        if self.watch is None:
            return None
        watch, others_s = self.watch, [self.bound_s(other) for other in self.counts if other != count]

        def told(progress: Progress) -> bool:
            bound_s, step_s = min([progress.bound_s, *others_s]), min(progress.step_s, self.step_s)
            overhead, gap = self.steps.problem.overhead(step_s), max(0.0, step_s / bound_s - 1) if bound_s > 0 else 0.0
            left = max(0.0, self.whole.left)
            if watch(Progress(step_s, bound_s, overhead, gap, left, progress.is_counted)):
                self.whole.end()
                return True
            return False

        return told


def _is_unfit(found: Optimum) -> bool:
    """Whether the plan exceeds the budget in what else it covers: its arena, or reserved bytes."""
    return NO_ARENA in found.notes or NOT_WITHIN in found.notes
