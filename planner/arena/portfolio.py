"""Many short searches for a smaller arena, unlike each other, each for a height between the bound and the best so far.

A search goes from coarse to fine: it places the blocks that are hardest to place, then, from there, more and more of
them, each time below the same height (:func:`place_all`). What is hard, how fast the number grows, and what it costs to
move a block differ from one search to the next: most fail, and some succeed at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from poochplan.planner.evaluator.evaluator_library import address, library
from poochplan.planner.problem.arrays import Ints

from .first_fit import first_fit

COARSEST = 24
"""Blocks that a search begins with."""
TURNS = 50_000
"""Blocks that one search places at most, about."""
FEWEST_SEARCHES = 2
"""Searches that the allowance is split among at least."""
LOWERED = (0.7, 0.85)
"""Of what the arena is above the bound, what the next search leaves; in turn while searches fail."""
CLOSE = 0.001
"""This close to the bound, as a part of it, the bound itself is asked for."""
DEAREST = 1_000_000
WAITS = -1
"""Offset of a block without a place."""


@dataclass(frozen=True)
class Manner:
    """How one search goes about it."""

    cost: float
    """The cost of a block is its area (bytes times lifetime) to this power."""
    life: float
    """The first blocks are those of the greatest size times lifetime to this power."""
    growth: float
    """How many times more blocks each next step places."""


WARM = Manner(0.4, 0.0, np.inf)
"""All at once, from the best places so far."""
MANNERS = (
    *(Manner(cost, life, 1.4) for life, cost in product((0.25, 0.5, 0.0), (0.4, 0.55))),
    WARM,
    *(Manner(cost, life, 2.0) for life, cost in product((0.25, 0.5, 0.0), (0.4, 0.3))),
    WARM,
)


class Portfolio:
    """The best places of blocks so far, and searches for better ones."""

    def __init__(self, spans: Ints, bound: int, offsets: Ints) -> None:
        """``spans`` are rows start, end, size, (3, blocks); ``offsets`` their places; ``bound`` is proven."""
        self.spans, self.bound, self.best = spans, bound, offsets
        self.life = (spans[1] - spans[0]).astype(np.float64)

    def improve(self, looks: int, enough: int = 0) -> None:
        """Searches until ``looks`` are taken (:func:`place_all`), or the bound or ``enough`` is met."""
        share = min(max(looks // FEWEST_SEARCHES, 1), TURNS * len(self.best))
        number = failed = 0
        while looks > 0 and self.top > max(self.bound, enough):
            above = int((self.top - self.bound) * LOWERED[failed % len(LOWERED)])
            height = max(self.bound + (above if above > CLOSE * self.bound else 0), enough)
            offsets, taken = self._search(height, MANNERS[number % len(MANNERS)], min(share, looks), number)
            looks -= max(taken, 1)
            number += 1
            failed += 1
            if offsets is not None:
                self.best, failed = settled(self.spans, offsets), 0

    @property
    def top(self) -> int:
        """Height of the best so far."""
        return int((self.best + self.spans[2]).max(initial=0))

    def _search(self, height: int, manner: Manner, allowance: int, seed: int) -> tuple[Ints | None, int]:
        """(Places below ``height``, or None; looks taken)."""
        areas = (self.spans[2] * self.life) ** manner.cost
        costs = 1 + (areas * (DEAREST / areas.max())).astype(np.int64)
        hard = np.lexsort((-self.life, -(self.spans[2] * self.life**manner.life)))
        offsets = self.best.copy() if manner is WARM else np.full(len(self.best), WAITS, dtype=np.int64)
        taken, count = 0, len(hard) if manner is WARM else min(COARSEST, len(hard))
        while True:
            some = hard[:count]
            places = offsets[some]
            spans = np.ascontiguousarray(self.spans[:, some])
            left, looks = place_all(spans, places, height, costs[some], allowance - taken, seed)
            offsets[some] = places
            taken += looks
            if left:
                return None, taken
            if count == len(hard):
                return offsets, taken
            count = min(len(hard), int(count * manner.growth) + 1)


def settled(spans: Ints, offsets: Ints) -> Ints:
    """The same places with every block as low as those below it let it be: none comes to lie higher."""
    return first_fit(spans, np.lexsort((spans[0], offsets)))


def place_all(spans: Ints, offsets: Ints, height: int, costs: Ints, allowance: int, seed: int) -> tuple[int, int]:
    """Gives every block a place below ``height``, or stops; returns (blocks without one, looks taken).

    A block that finds no room takes the cheapest place, and who lay there waits; ``native/packing.h`` says how. Only
    compiled code does it: in plain Python it would gain nothing in the time there is.

    Parameters
    ----------
    spans
        Rows start, end, size; a column for each block; int64, (3, blocks). No size is 0 or above ``height``.
    offsets
        Where blocks are, without an overlap; below 0 is nowhere, as is what sticks out of ``height``. Written in place.
    costs
        What it costs to take a block's place away; int64, (blocks,), from 1 to a million.
    allowance
        Looks taken at most, and one turn's more. A look is one block that is looked at.
    """
    looks = np.array([allowance], dtype=np.int64)
    given = address(spans), len(offsets), address(offsets), height, address(costs), seed
    return int(library().place_all(*given, address(looks))), int(looks[0])
