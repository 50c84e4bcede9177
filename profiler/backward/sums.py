"""Sums: what torch makes of several gradients for one place, between the nodes of a backward.

It writes the sum where the first of them lies, if nobody else holds that, and else to new memory. Where a capture has
looked at a gradient's storage it holds it, and all sums are new ones. So what torch does without it is worked out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from poochplan.profiler.capture.lifetimes import Lifetimes

Edge = tuple[Any, int]
"""The node that is given a gradient, and in which place."""


@dataclass
class Pending:
    """What waits for a node in one place."""

    number: int
    """The value that came first; -1 for none."""
    is_dense: bool
    own: torch.UntypedStorage | None = None
    """That of the first, which the sum is written to."""
    made_behind: int = -1
    """The op behind which the sum was made; -1 where there is none, or it is no new value."""


class Sums(dict[Edge, Pending]):
    """By where they go."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        super().__init__()
        self._lifetimes = lifetimes

    def adds(self, edge: Edge, number: int, behind: int, *, is_dense: bool) -> None:
        """That value goes there, behind that op."""
        pending = self.get(edge)
        if edge[0] is None or pending is None:
            self[edge] = Pending(number, is_dense)
        elif pending.own is None and pending.made_behind < 0:
            holders = [number, *(one.number for one in self.values())].count(pending.number)
            if pending.is_dense and holders == 1:
                pending.own = self._lifetimes.storage_of(pending.number)
            if pending.own is None:
                pending.made_behind = behind
