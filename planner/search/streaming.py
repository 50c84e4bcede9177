"""How much optimizer state is streamed: decided together with the activations, under one budget.

The search of activations (``optimise.py``) knows one step. Here it is called for several counts of streamed chunks. An
interval of counts has a bound: that of a step with the bytes of its largest count and the seconds of its smallest. The
interval with the least bound is looked at next, by the relaxation, then by a short search at its middle. A long search
at the best count follows. The least bound of all intervals holds for every count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import SolveStatus, StateChunk
from poochplan.planner.arena.reserved import NOT_WITHIN
from poochplan.planner.arena.step_layout import NO_ARENA
from poochplan.planner.search.allowance import EVALUATIONS_PER_SOLVE, Allowance, Progress, SearchCallback, SearchLimits
from poochplan.planner.search.bound import lower_bound
from poochplan.planner.search.optimise import BUILD_SHARE, Optimum
from poochplan.planner.search.solvers import choose_solver
from poochplan.planner.simulator.evaluator import library
from poochplan.planner.simulator.optimizer_state import between, chunks_of, streamed, streamed_bytes
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import keep_all
from poochplan.planner.simulator.simulate import simulated, swap_all_on_demand

SHORT_SHARE = 0.06
"""Share of the allowance of each short search."""
SHORT_SEARCHES = 7
"""Most short searches before the long one."""
EXPLORE_SHARE = 0.5
"""Share of the allowance for short searches, and the bounds of intervals, before the long one."""
LONG_SHARE = 0.9
"""Share of the rest that the long search may take: the least bound is raised after it."""
PROOF_SHARE = 0.2
"""Share of the rest that one interval's bound may take."""

Search = Callable[[Problem, SearchLimits, SearchCallback | None], Optimum]
"""The best plan that was found for a step with some state streamed."""


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


@dataclass(order=True)
class _Interval:
    """Counts that no search was made for."""

    bound_s: float
    """No plan with these counts has a shorter step."""
    first: int
    last: int
    is_proven: bool = field(default=False, compare=False)
    """Whether the bound is the relaxation's, and not the seconds of the step alone."""

    @property
    def middle(self) -> int:
        return (self.first + self.last) // 2


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
    """State: the best plan of each count that was searched for, and the intervals between these."""

    def __init__(
        self, steps: Streaming, budget_bytes: int, effort: SearchLimits, search: Search, watch: SearchCallback | None
    ) -> None:
        self.steps, self.budget_bytes, self.effort = steps, budget_bytes, effort
        self.search, self.watch = search, watch
        self.whole, self.solver = effort.allowance(), choose_solver(effort.solver)
        self.found = dict[int, Optimum]()
        self.bounds_s = dict[int, float]()
        """By count that was searched for."""
        self.open, self.closed = list[_Interval](), list[_Interval]()
        """The closed ones hold no plan that is worth a search."""
        self.refusal: InfeasibleError | None = None
        self.is_stopped = False

    def run(self) -> None:
        if not self.whole.is_counted:
            library(BUILD_SHARE * self.effort.time_limit_s)
        first, kept = self.steps.fewest(self.budget_bytes), self.steps.fewest_kept(self.budget_bytes)
        assert first is not None, "the caller has checked that"
        self.open = [self._interval(first, self.steps.most)]
        if kept is not None:
            self._look(kept)  # often at once: nothing is left to decide
        self._look(first)
        self._explore(self.whole.part(EXPLORE_SHARE), SHORT_SEARCHES)
        self._search_long()
        self._explore(self.whole, self.steps.most + 1)

    def chosen(self) -> tuple[Problem, Optimum]:
        if not self.found:
            assert self.refusal is not None
            raise self.refusal
        count = self.best
        found, bound_s = self.found[count], self.bound_s
        step_s, status = found.best.simulation.step_s, self.whole.status
        if found.status is SolveStatus.INTERRUPTED or self.is_stopped:
            status = found.status
        if step_s <= bound_s * (1 + self.effort.gap):
            status = SolveStatus.WITHIN_GAP
        elif found.status is SolveStatus.SEARCHED and not self.whole.is_spent:
            status = SolveStatus.SEARCHED
        rounds = sum(one.rounds for one in self.found.values()) + sum(one.is_proven for one in self.open + self.closed)
        found = replace(found, bound_s=bound_s, status=status, rounds=rounds, solver=self.solver)
        return self.steps.step(count), replace(found, evaluations=self.effort.evaluations, seed=self.effort.seed)

    # -- how far it is ------------------------------------------------------------------------------------------------

    @property
    def best(self) -> int:
        return min(self.found, key=lambda count: (_is_unfit(self.found[count]), self._step_s(count), count))

    @property
    def step_s(self) -> float:
        """Of the best plan that fits; infinite before there is one."""
        fit = (self._step_s(count) for count, found in self.found.items() if not _is_unfit(found))
        return min(fit, default=inf)

    @property
    def bound_s(self) -> float:
        """No plan within the budget has a shorter step."""
        return min([*self.bounds_s.values(), *(one.bound_s for one in (*self.open, *self.closed))])

    def _step_s(self, count: int) -> float:
        return self.found[count].best.simulation.step_s

    def _is_near(self, bound_s: float) -> bool:
        return self.step_s <= bound_s * (1 + self.effort.gap)

    # -- counts that were not searched for ----------------------------------------------------------------------------

    def _interval(self, first: int, last: int, least_s: float = 0.0) -> _Interval:
        return _Interval(max(least_s, self.steps.step(first).keep_all_s), first, last)

    def _explore(self, allowance: Allowance, searches: int) -> None:
        """Proves bounds of intervals, and searches in them, until none can hold a better plan."""
        while self.open and searches and not (self.is_stopped or allowance.is_spent or self.whole.is_spent):
            least = min(self.open)
            if self._is_near(least.bound_s):
                return
            if least.is_proven or least.first == least.last:
                self._look(least.middle)
                searches -= 1
            else:
                self._prove(least, allowance)

    def _prove(self, interval: _Interval, allowance: Allowance) -> None:
        fewest, most = self.steps.state(interval.first), self.steps.state(interval.last)
        step = Problem.of(between(self.steps.problem.measured, fewest, most))
        limits = allowance.part(PROOF_SHARE).limits()
        allowance.spend(EVALUATIONS_PER_SOLVE)
        bound_s = lower_bound(step, self.budget_bytes, self.solver, limits)
        interval.bound_s, interval.is_proven = max(interval.bound_s, bound_s), True

    def _divide(self, count: int) -> float:
        """Takes the count out of its interval, and returns what was proven of it."""
        whole = next((one for one in self.open if one.first <= count <= one.last), None)
        if whole is None:
            return 0.0
        self.open.remove(whole)
        for first, last in ((whole.first, count - 1), (count + 1, whole.last)):
            if first <= last:
                self.open.append(self._interval(first, last, whole.bound_s))
        return whole.bound_s

    # -- searches -----------------------------------------------------------------------------------------------------

    def _look(self, count: int) -> None:
        """A short search, unless there was one."""
        if count not in self.bounds_s and not self.is_stopped:
            proven_s = max(self._divide(count), self.steps.step(count).keep_all_s)
            self.bounds_s[count] = proven_s
            self._search(count, SHORT_SHARE)

    def _search_long(self) -> None:
        """Spends most of the rest at the best count, unless nothing is to be gained there."""
        if self.found and not self.is_stopped and not self._is_near(self.bounds_s[self.best]):
            self._search(self.best, 1.0, LONG_SHARE)

    def _search(self, count: int, share: float, share_of_rest: float = 1.0) -> None:
        limits = self._limits(count, share, share_of_rest)
        try:
            found = self.search(self.steps.step(count), limits, self._watch_for(count))
        except InfeasibleError as error:
            self.refusal = error
            return
        if limits.evaluations is not None and found.status is not SolveStatus.NOT_NEEDED:
            self.whole.spend(limits.evaluations)
        if found.bound_s is not None:
            self.bounds_s[count] = max(self.bounds_s[count], found.bound_s)
        before = self.found.get(count)
        if before is None or (_is_unfit(found), found.best.simulation.step_s) < (
            _is_unfit(before),
            self._step_s(count),
        ):
            self.found[count] = found
        self.is_stopped |= found.status is SolveStatus.INTERRUPTED
        if _is_unfit(found):  # and fewer chunks leave even less
            below = [one for one in self.open if one.last < count]
            self.open = [one for one in self.open if one not in below]
            self.closed += below

    def _limits(self, count: int, share: float, share_of_rest: float) -> SearchLimits:
        """What one search may take: of the whole, within a share of the rest, and of the host's memory."""
        effort, host_bytes, left = self.effort, None, share_of_rest * self.whole.left
        if effort.host_bytes is not None:
            host_bytes = effort.host_bytes - streamed_bytes(self.steps.state(count))
        if effort.evaluations is not None:
            evaluations = max(1, int(min(share * effort.evaluations, left)))
            return replace(effort, host_bytes=host_bytes, evaluations=evaluations)
        limit_s = max(0.0, min(share * effort.time_limit_s, left))
        return replace(effort, host_bytes=host_bytes, time_limit_s=limit_s)

    def _watch_for(self, count: int) -> SearchCallback | None:
        if self.watch is None:
            return None
        watch, others = self.watch, [one.bound_s for one in (*self.open, *self.closed)]

        def told(progress: Progress) -> bool:
            bound_s = min([progress.bound_s, *others, *(s for one, s in self.bounds_s.items() if one != count)])
            step_s = min(progress.step_s, self.step_s)
            overhead, gap = self.steps.problem.overhead(step_s), max(0.0, step_s / bound_s - 1) if bound_s > 0 else 0.0
            left = max(0.0, self.whole.left)
            ends = watch(Progress(step_s, bound_s, overhead, gap, left, is_counted=progress.is_counted))
            self.is_stopped |= bool(ends)
            return bool(ends)

        return told


def _is_unfit(found: Optimum) -> bool:
    """Whether the plan exceeds the budget in what else it covers: its arena, or reserved bytes."""
    return NO_ARENA in found.notes or NOT_WITHIN in found.notes
