"""Greedy: one decision after the other, each the one that frees the most bytes per second it costs."""

from __future__ import annotations

import numpy as np

from ..candidate import ON_DEMAND, Candidate, try_style
from ..problem import Ints
from ..schedule import Style
from ..schema import Decision
from .base import PolicyInput, policy

EVALUATIONS = 800
"""Simulations after which greedy goes on with the costs it knows."""
LINK_WEIGHT = 1e-4
"""Share of its seconds on the link that a swap costs even where it hides, so that the hidden ones are comparable."""


@policy(
    "greedy",
    "swaps or recomputes, one value at a time, what frees the most peak bytes per second of overhead until it fits",
)
def run_greedy(given: PolicyInput) -> Candidate:
    """Repeatedly the decision with the most bytes freed at the peak per second of simulated overhead, until it fits.

    Overhead is that of a schedule for the peak reached so far. Gains are evaluated lazily: a decision is simulated
    again only when what was known of it makes it the best, and after :data:`EVALUATIONS` simulations not at all; beside
    these, one memory curve is made for each decision taken. Where nothing is left that lowers the peak, the recomputed
    values nearest to it are swapped instead; so a plan is found whenever there is one.
    """
    search = _Greedy(given)
    while search.is_over and search.step():
        pass
    return given.candidate(search.wish)


class _Greedy:
    """State: the decisions so far, their memory and step time, and what is known of each further decision's cost."""

    def __init__(self, given: PolicyInput) -> None:
        self.given, self.problem = given, given.problem
        self.wish = list(given.wish())
        self.memory: Ints = self._memory_of(self.wish)
        self.step_s = self.problem.step_s
        self.cost_s = {
            (value, decision): self._least_cost_s(value, decision)
            for value in given.movable
            for decision in (Decision.SWAP, Decision.RECOMPUTE)
            if decision is Decision.SWAP or value in given.replayable
        }
        self.left = EVALUATIONS
        self.turned_at_once = 1

    @property
    def is_over(self) -> bool:
        return int(self.memory.max()) > self.given.budget_bytes

    def step(self) -> bool:
        """Takes one decision; False when there is none left."""
        tick = int(np.argmax(self.memory))
        size_bytes = self.problem.rounded_bytes
        moves = [move for move in self.cost_s if self._frees(move[0], tick)]
        fresh: dict[tuple[int, Decision], float] = {}
        while moves:
            moves.sort(key=lambda move: (size_bytes[move[0]] / self.cost_s[move], size_bytes[move[0]], -move[0]))
            best = moves[-1]
            if best in fresh or self.left <= 0:
                if self._take(best, fresh.get(best)):
                    return True
                moves.remove(best)
                del self.cost_s[best]
                continue
            fresh[best] = self._evaluate(best)
        return self._turn_to_swaps(tick)

    def _frees(self, value: int, tick: int) -> bool:
        """Whether a kept value is there at ``tick`` for nobody but a later use."""
        problem = self.problem
        first = max(int(problem.forward_death[value]) + 1, int(problem.save_tick[value]))
        return self.wish[value] is Decision.KEEP and first <= tick < self._absent_until(value)

    def _absent_until(self, value: int) -> int:
        return int(min(self.problem.first_use[value], self.problem.freed[value] + 1))

    def _least_cost_s(self, value: int, decision: Decision) -> float:
        link_s = self.problem.out_seconds(value) + self.problem.in_seconds(value)
        if decision is Decision.SWAP:
            return LINK_WEIGHT * link_s
        replay = self.problem.replay.replays[value]
        assert replay is not None
        return max(replay.seconds, 1e-12)

    def _with(self, move: tuple[int, Decision]) -> list[Decision]:
        wish = list(self.wish)
        wish[move[0]] = move[1]
        return wish

    def _evaluate(self, move: tuple[int, Decision]) -> float:
        """Step time with one more decision, scheduled for the peak it reaches; updates what its cost is known to be."""
        value = move[0]
        memory = self.memory.copy()
        first = max(int(self.problem.forward_death[value]) + 1, int(self.problem.save_tick[value]))
        memory[first : self._absent_until(value)] -= self.problem.rounded_bytes[value]
        wish = self._with(move)
        target = max(self.given.budget_bytes, int(memory.max()))
        found = try_style(self.problem, "", wish, target, Style())
        self.left -= 1
        if found.simulation.peak_bytes > target:
            target = int(self._memory_of(wish).max())
            found = try_style(self.problem, "", wish, target, Style())
            self.left -= 2
        step_s = found.simulation.step_s
        self.cost_s[move] = max(0.0, step_s - self.step_s) + LINK_WEIGHT * self._link_s(move)
        return step_s

    def _link_s(self, move: tuple[int, Decision]) -> float:
        return self.problem.out_seconds(move[0]) + self.problem.in_seconds(move[0])

    def _take(self, move: tuple[int, Decision], step_s: float | None) -> bool:
        """Decides, unless that frees nothing at the peak or raises it."""
        wish = self._with(move)
        memory = self._memory_of(wish)
        if not _is_lower(memory, self.memory):
            return False
        self.wish, self.memory = wish, memory
        self.step_s = self.step_s + self.cost_s[move] if step_s is None else step_s
        return True

    def _turn_to_swaps(self, tick: int) -> bool:
        """Swaps the recomputed values nearest to ``tick``, twice as many each time; False when there are none."""
        recomputed = [value for value, decision in enumerate(self.wish) if decision is Decision.RECOMPUTE]
        recomputed.sort(key=lambda value: abs(int(self.problem.first_use[value]) - tick))
        for value in recomputed[: self.turned_at_once]:
            self.wish[value] = Decision.SWAP
        self.turned_at_once *= 2
        self.memory = self._memory_of(self.wish)
        return bool(recomputed)

    def _memory_of(self, wish: list[Decision]) -> Ints:
        """The least memory that decisions can do with, tick by tick."""
        return try_style(self.problem, "", wish, 0, ON_DEMAND).simulation.memory_bytes


def _is_lower(memory: Ints, before: Ints) -> bool:
    tick = int(np.argmax(before))
    return bool(memory[tick] < before[tick] and memory.max() <= before[tick])
