"""Greedy: takes one decision after another, each time the one that frees the most bytes per second of its cost."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from poochplan.formats.occupancy import Ints
from poochplan.formats.plan import Decision
from poochplan.planner.simulator.schedule import Style
from poochplan.planner.simulator.simulate import ON_DEMAND, Candidate

from .registry import PolicyInput, policy

EVALUATIONS = 500
"""Number of simulations in one run. After these it uses the costs that it has."""
STEPS = 200
"""Values smaller than the missing bytes divided by this are decided several at a time."""
STYLES = (Style(), Style(release="early"))
"""Styles for simulating costs: the first is accurate if the link has spare time, the second if it has none."""
LEAST_COST = 1e-4
"""A move costs at least this share of its seconds on the link or of its replay, so that free moves can be compared."""
Move: TypeAlias = tuple[int, Decision]
"""A value that has been kept so far, and the decision to take instead."""
Moves: TypeAlias = tuple[Move, ...]
"""Moves of the same kind that are taken together."""


@policy("greedy")
def run_greedy(given: PolicyInput) -> Candidate:
    """Takes the decision that frees the most bytes at the peak per second of simulated overhead, until the plan fits.

    The overhead is that of a schedule for the peak so far. A swap may hide there, and no longer hide at a lower peak.
    So greedy runs twice, with late and with early releases, and returns the better plan. A decision is simulated again
    only if its last known cost makes it the best, and never after :data:`EVALUATIONS` simulations. Small values are
    decided together, up to the missing bytes divided by :data:`STEPS`. If no decision lowers the peak any more, the
    recomputed values nearest to it are swapped instead. So a plan is found whenever there is one.
    """
    tried = []
    for style in STYLES:
        search = _Greedy(given, style)
        while search.is_over and not given.is_over and search.step():
            pass
        tried.append(given.candidate(search.wish))
    return min(tried, key=given.rank)


class _Greedy:
    """State: the decisions so far, their memory and step time, and the known costs of further decisions."""

    def __init__(self, given: PolicyInput, style: Style) -> None:
        self.given, self.problem, self.style = given, given.problem, style
        self.wish = list(given.wish())
        self.memory: Ints = self._memory_of(self.wish)
        self.step_s = self.problem.keep_all_s
        self.cost_s = {
            **{(value, Decision.SWAP): LEAST_COST * self._alone_s((value, Decision.SWAP)) for value in given.movable},
            **{(v, Decision.RECOMPUTE): self._alone_s((v, Decision.RECOMPUTE)) for v in sorted(given.replayable)},
        }
        self.unknown = set(self.cost_s)
        """Moves that were never simulated. After the last simulation, they cost all their seconds."""
        self.useless: set[Move] = set()
        """Moves that free no memory, because replays read their values."""
        self.left = EVALUATIONS
        self.turned_at_once = 1
        self.chunk_bytes = (int(self.memory.max()) - given.budget_bytes) // STEPS

    @property
    def is_over(self) -> bool:
        return int(self.memory.max()) > self.given.budget_bytes

    def step(self) -> bool:
        """Takes one decision; False if there is none left."""
        tick = int(np.argmax(self.memory))
        moves = [move for move in self.cost_s if move not in self.useless and self._frees(move[0], tick)]
        fresh: dict[Moves, float] = {}
        while moves and not self.given.is_over:
            best = self._best_of(moves)
            if best in fresh or self.left <= 0:
                if self._take(best, fresh.get(best)):
                    return True
                moves = [move for move in moves if move not in best]
                self.useless.update(best)
            else:
                fresh[best] = self._evaluate(best)
        return self._turn_to_swaps(tick)

    def _best_of(self, moves: list[Move]) -> Moves:
        """The move that frees the most bytes per second; if it is small, the next moves of its kind too."""
        size_bytes = self.problem.rounded_bytes

        def gain(move: Move) -> tuple[float, int, int]:
            return float(size_bytes[move[0]]) / self.cost_s[move], int(size_bytes[move[0]]), -move[0]

        best = max(moves, key=gain)
        if size_bytes[best[0]] >= self.chunk_bytes:
            return (best,)
        together: list[Move] = []
        left_bytes = self.chunk_bytes
        for move in sorted((move for move in moves if move[1] is best[1]), key=gain, reverse=True):
            together.append(move)
            left_bytes -= int(size_bytes[move[0]])
            if left_bytes <= 0:
                break
        return tuple(together)

    def _frees(self, value: int, tick: int) -> bool:
        """Whether a value is kept and, at ``tick``, only waits for a later use."""
        first, until = self.given.away(value)
        return self.wish[value] is Decision.KEEP and first <= tick < until

    def _alone_s(self, move: Move) -> float:
        """Seconds on the link, or of the replay from kept values."""
        value, decision = move
        if decision is Decision.SWAP:
            return self.problem.out_seconds(value) + self.problem.in_seconds(value)
        return max(self.problem.replay_seconds(value), 1e-12)

    def _with(self, moves: Moves) -> list[Decision]:
        wish = list(self.wish)
        for value, decision in moves:
            wish[value] = decision
        return wish

    def _evaluate(self, moves: Moves) -> float:
        """Step time with these decisions too, scheduled for the peak that they reach. It updates their cost."""
        memory = self.memory.copy()
        for value, _ in moves:
            first, until = self.given.away(value)
            memory[first:until] -= self.problem.rounded_bytes[value]
        wish = self._with(moves)
        target = max(self.given.budget_bytes, int(memory.max()))
        found = self.given.evaluator.evaluate(wish, target, self.style)
        self.left -= 1
        if found.peak_bytes > target:
            target = int(self._memory_of(wish).max())
            found = self.given.evaluator.evaluate(wish, target, self.style)
            self.left -= 2
        step_s = found.step_s
        total_bytes = max(1.0, sum(float(self.problem.rounded_bytes[value]) for value, _ in moves))
        for move in moves:
            share = float(self.problem.rounded_bytes[move[0]]) / total_bytes
            self.cost_s[move] = share * max(0.0, step_s - self.step_s) + LEAST_COST * self._alone_s(move)
        self.unknown.difference_update(moves)
        if self.left <= 0:
            self.cost_s.update({move: self._alone_s(move) for move in self.unknown})
        return step_s

    def _take(self, moves: Moves, step_s: float | None) -> bool:
        """Takes these decisions; returns False if they do not lower the peak."""
        wish = self._with(moves)
        memory = self._memory_of(wish)
        tick = int(np.argmax(self.memory))
        if memory[tick] >= self.memory[tick] or memory.max() > self.memory[tick]:
            return False
        self.wish, self.memory = wish, memory
        self.step_s = self.step_s + sum(self.cost_s[move] for move in moves) if step_s is None else step_s
        return True

    def _turn_to_swaps(self, tick: int) -> bool:
        """Swaps the recomputed values nearest to ``tick``, twice as many each time; False if there are none."""
        recomputed = [value for value, decision in enumerate(self.wish) if decision is Decision.RECOMPUTE]
        recomputed.sort(key=lambda value: abs(int(self.problem.first_use[value]) - tick))
        for value in recomputed[: self.turned_at_once]:
            self.wish[value] = Decision.SWAP
        self.turned_at_once *= 2
        self.useless.clear()
        self.memory = self._memory_of(self.wish)
        return bool(recomputed)

    def _memory_of(self, wish: list[Decision]) -> Ints:
        """The least memory that these decisions need, by tick."""
        return self.given.evaluator.memory_bytes(wish, 0, ON_DEMAND)
