"""Branching on the largest values: which way the few decisions go that decide all others, and a bound that proves it.

Best-first branch and bound (Land and Doig, 1960) on the relaxation BOUND: the node with the least bound is taken, its
largest undecided value is decided each way there is, and each child is solved again from the basis at hand. The least
bound of the nodes that are open holds for every plan; the nodes themselves are where to look for plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from poochplan.formats.plan import Decision
from poochplan.planner.allowance import Allowance
from poochplan.planner.evaluator.codes import DECISIONS
from poochplan.planner.problem.arrays import Bytes, Floats
from poochplan.planner.problem.problem import Problem

from .relaxation import Relaxation, Relaxed

DECIDED = 0.98
"""A value of which the relaxation decides this share one way needs no branching."""
FEW = 8
"""At most so many values are branched on, the largest first."""
PINNED = 2
"""The largest of them, by which places to look in are told apart."""
LARGE_SHARE = 0.02
"""Only values of at least this share of the saved bytes are."""


@dataclass(frozen=True, eq=False)
class Node:
    """Some values decided, and what the relaxation makes of the others."""

    bound_s: float
    fixed: Mapping[int, Decision]
    shares: Floats
    """(3, values): the shares kept, swapped and recomputed."""

    def rounded(self, problem: Problem) -> Bytes:
        """Each value as it is decided, else as its largest share has it."""
        codes: Bytes = np.argmax(self.shares, axis=0).astype(np.int8)
        for value, decision in self.fixed.items():  # the shares are the parent's where the solver ran out of time
            codes[value] = DECISIONS.index(decision)
        for value, reason in enumerate(problem.must_keep):
            if reason:
                codes[value] = 0
        return codes


@dataclass(frozen=True, eq=False)
class Place:
    """Decisions to look for a plan near to."""

    codes: Bytes
    pinned: tuple[int, ...] = ()
    """Values that are not to change."""
    bound_s: float = 0.0


@dataclass
class Branching:
    """State: the open nodes, the least bound first."""

    relaxation: Relaxation
    large: tuple[int, ...]
    """Values to branch on, the largest first."""
    bound_s: float = 0.0
    """No plan within the budget has a shorter step, unless one was found that is as short as this."""
    solved: int = 0
    _open: list[tuple[float, int, Node]] = field(default_factory=list)
    _leaves: list[Node] = field(default_factory=list)

    def begin(self, allowance: Allowance) -> None:
        """Solves the root: BOUND with nothing decided."""
        found = self.relaxation.solve({}, allowance.limits())
        self.solved += 1
        self.bound_s = found.bound_s
        root = _node(found, {}, 0.0)
        if root is not None:
            heapq.heappush(self._open, (root.bound_s, self.solved, root))

    def step(self, allowance: Allowance, enough_s: float) -> bool:
        """Branches once; nodes that are not below ``enough_s`` are not looked into. Whether there is more to do."""
        if not self._open or self._open[0][0] >= enough_s:
            return False
        _, _, node = heapq.heappop(self._open)
        value = self._next_value(node)
        if value is None:
            self._leaves.append(node)
        else:
            self._branch(node, value, allowance)
        self._tell()
        return bool(self._open)

    def places(self) -> list[Place]:
        """Where to look for plans, the least bound first: how the large values may be decided."""
        nodes = sorted([*self._leaves, *(node for _, _, node in self._open)], key=lambda node: node.bound_s)
        pinned = self.large[:PINNED]
        kept: dict[bytes, Place] = {}
        for node in nodes:
            codes = node.rounded(self.relaxation.problem)
            kept.setdefault(codes[list(pinned)].tobytes(), Place(codes, pinned, node.bound_s))
        return list(kept.values())

    def _next_value(self, node: Node) -> int | None:
        """The largest that is not decided."""
        free = (v for v in self.large if v not in node.fixed and node.shares[:, v].max() < DECIDED)
        return next(free, None)

    def _branch(self, node: Node, value: int, allowance: Allowance) -> None:
        for decision in DECISIONS:
            if decision is Decision.RECOMPUTE and self.relaxation.problem.replay.replays[value] is None:
                continue
            fixed = {**node.fixed, value: decision}
            found = self.relaxation.solve(fixed, allowance.limits())
            self.solved += 1
            if found.bound_s == inf:
                continue
            child = _node(found, fixed, node.bound_s) or Node(node.bound_s, fixed, node.shares)
            heapq.heappush(self._open, (child.bound_s, self.solved, child))

    def _tell(self) -> None:
        """The bound of all that is left: open nodes, and leaves, whose plans may be as short as their bounds."""
        least = min([self._open[0][0]] if self._open else [inf])
        least = min([least, *(leaf.bound_s for leaf in self._leaves)])
        if least < inf:
            self.bound_s = max(self.bound_s, least)


def values_to_branch_on(problem: Problem, movable: Sequence[int]) -> tuple[int, ...]:
    """The few largest of the values that may move, the largest first."""
    size_bytes = problem.rounded_bytes
    least = LARGE_SHARE * float(size_bytes.sum())
    large = [value for value in movable if size_bytes[value] >= least]
    return tuple(sorted(large, key=lambda v: (-int(size_bytes[v]), v))[:FEW])


def _node(found: Relaxed, fixed: Mapping[int, Decision], least_s: float) -> Node | None:
    if found.keep is None or found.swap is None or found.recompute is None:
        return None
    return Node(max(least_s, found.bound_s), fixed, np.stack([found.keep, found.swap, found.recompute]))
