"""The starting points of walks, their order, and their results. The threads of a search share them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from poochplan.formats.occupancy import Codes
from poochplan.formats.plan import Decision
from poochplan.planner.search.allowance import Allowance
from poochplan.planner.search.annealing import EvaluatedPlan, Incumbents, Walker
from poochplan.planner.search.bound import values_to_branch_on
from poochplan.planner.simulator.evaluator import KEEP, RECOMPUTE, SWAP, codes_of
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.simulate import movable, swap_all

RECOMPUTE_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def simple_decisions(problem: Problem) -> Iterator[tuple[str, tuple[Decision, ...]]]:
    """By name: swap-all, recompute-all, and mixes: the cheapest replays, the rest swapped."""
    yield "swap-all", swap_all(problem)
    replayable = sorted(
        (value for value in movable(problem) if problem.replay.replays[value] is not None),
        key=lambda value: (problem.replay_seconds(value) / max(1, int(problem.rounded_bytes[value])), value),
    )
    for share in RECOMPUTE_SHARES:
        wish = list(swap_all(problem))
        for value in replayable[: round(len(replayable) * share)]:
            wish[value] = Decision.RECOMPUTE
        name = "recompute-all" if share == 1.0 else f"recompute {share:.0%}, swap the rest"
        yield name, tuple(wish)


def all_decisions(problem: Problem, most: int) -> list[tuple[Decision, ...]] | None:
    """Every way to decide; None if there are more than ``most``."""
    choices = [_choices(problem, value) for value in range(problem.value_count)]
    if prod(len(choice) for choice in choices) > most:
        return None
    return list(product(*choices))


def _choices(problem: Problem, value: int) -> tuple[Decision, ...]:
    if problem.must_keep[value]:
        return (Decision.KEEP,)
    if problem.replay.replays[value] is None:
        return Decision.KEEP, Decision.SWAP
    return tuple(Decision)


BASINS = 4
"""Walks begin with this many ways to decide the largest values."""
EVALUATIONS_PER_VALUE = 250
"""Most simulations of one walk, at first."""
LONGER = 6
"""After this many walks they become twice as long, up to four times."""
WALK_SHARE, DESCENT_SHARE = 0.5, 0.2
"""Shares of the rest that one walk, and one descent, may take."""
ENDS = 6
"""Number of results of walks that are remembered, for other walks to take decisions from."""
WALKS = 12
"""Once every starting point has had its walk, the search ends after this many further walks without a gain."""
HOT, WARM, COOL = 0.02, 0.005, 0.003
"""Temperatures at which walks begin, as shares of the step: far from good plans, at a rounded solution, at the best."""
REPAIRS = 3
"""How often the end of a walk whose arena does not fit is tried again with fewer live bytes."""
MIN_GAIN = 1e-5
"""Smallest gain of a walk that counts, as a share of the step."""


@dataclass(frozen=True, eq=False)
class Start:
    codes: Codes
    origin: str
    temperature: float
    pinned: tuple[int, ...] = ()
    """Values whose decisions do not change."""


class Walking:
    """State: the starting points that wait for their walk, and the results of earlier walks."""

    def __init__(
        self,
        values: Sequence[int],
        tiny: frozenset[int],
        incumbents: Incumbents,
        allowance: Allowance,
        seed: int,
    ) -> None:
        self.problem, self.values, self.tiny, self.incumbents = incumbents.problem, tuple(values), tiny, incumbents
        self._allowance, self._seed = allowance, seed
        self._starts: list[Start] = []
        self._ends: list[EvaluatedPlan] = []
        self._walks = self._again = self._last_gain = 0
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether further walks would hardly gain anything."""
        return not self._starts and self._again >= self._last_gain + WALKS

    def has_walked(self, again: int) -> bool:
        """Whether every starting point has had its walk, and that many more walks were made."""
        return not self._starts and self._again >= again

    def begin(self) -> None:
        """The first starts: everything swapped; and, until branching has better ones, the largest value in each way."""
        self._starts.append(self._pinned({}))
        for value in values_to_branch_on(self.problem, self.values)[:1]:
            ways = (SWAP, KEEP, RECOMPUTE)[: len(_choices(self.problem, value))]
            self._starts += [self._pinned({value: code}) for code in ways]

    def look_in(self, basins: Sequence[dict[int, int]]) -> None:
        """Starting points with the large values decided as in branching, before all others."""
        starts = [self._pinned(decided) for decided in basins[:BASINS]]
        with self._lock:
            self._starts = starts + [start for start in self._starts if not start.pinned]

    def look_near(self, codes: Codes) -> None:
        """A starting point at the rounded solution of a model."""
        with self._lock:
            self._starts.append(Start(codes, "ilp", WARM))

    def once(self, walker: Walker) -> None:
        """One walk, from the next starting point or from the results of earlier walks, followed by a descent."""
        with self._lock:
            self._walks += 1
            walk, start, ends = self._walks, self._starts.pop(0) if self._starts else None, list(self._ends)
            self._again += start is None
            again = self._again
        length = EVALUATIONS_PER_VALUE * len(self.values) * 2 ** min(2, again // LONGER)
        part, before_s = self._allowance.part(WALK_SHARE, length), self.incumbents.step_s
        start, mate = (start, None) if start is not None else self._start_again(again, ends)
        found = walker.anneal(
            walker.try_styles(start.codes, start.origin),
            part,
            temperature=start.temperature,
            seed=self._seed * 1000 + walk,
            pinned=start.pinned,
            mate=mate,
        )
        end = self.descend(walker, found)
        for _ in range(REPAIRS):
            if end.needed_bytes <= self.incumbents.budget_bytes or self._allowance.is_spent:
                break
            end = self.descend(walker, walker.try_styles(end.wish, end.origin))
        with self._lock:
            if self.incumbents.step_s < before_s * (1 - MIN_GAIN):
                self._last_gain = self._again
            self._ends = sorted([*self._ends, end], key=self.incumbents.rank)[:ENDS]

    def descend(self, walker: Walker, found: EvaluatedPlan) -> EvaluatedPlan:
        """Descends to a local optimum, within the share that a descent may take."""
        return walker.descend(found, self._allowance.part(DESCENT_SHARE, EVALUATIONS_PER_VALUE * len(self.values)))

    def _start_again(self, again: int, ends: Sequence[EvaluatedPlan]) -> tuple[Start, EvaluatedPlan | None]:
        """The start of a walk once every starting point has had its own, and a plan to take decisions from."""
        best = self.incumbents.best()
        if again % 4 == 0 or not ends:
            largest = values_to_branch_on(self.problem, self.values)[:1] if again % 8 else ()
            return self._pinned({value: int(best.wish[value]) for value in largest}), None
        if again % 4 == 3 and len(ends) > 1:
            return Start(ends[1].wish, ends[1].origin, COOL), best
        return Start(best.wish, best.origin, COOL if again % 4 == 1 else WARM), ends[again % len(ends)]

    def _pinned(self, decided: Mapping[int, int]) -> Start:
        """Swap-all, except for tiny values, which are kept, and for the given decisions, which do not change."""
        codes = codes_of(swap_all(self.problem))
        codes[list(self.tiny)] = KEEP
        for value, decision in decided.items():
            codes[value] = decision
        return Start(codes, "ilp" if decided else "swap-all", HOT, tuple(decided))
