"""Marks: which layer of its plan a step has come to, where steps leave out layers and some layers look the same."""

from __future__ import annotations

from collections.abc import Callable

LEARNED_IN = 8
"""So many steps are followed before parameters count."""
MOST_KNOWN = 1 << 14
"""Of more parameters some are made anew in each step, and tell nothing."""


class Marks:
    """The places of layers in a plan, by the parameters that they save beside their values.

    State: for each parameter, by its storage, the save point that steps have come to when they first save it. It is the
    most of all steps, because one that leaves out layers comes to fewer: by as many as its earlier parameters lack
    there. If a place lies behind the plan, layers come in another order, and none counts any more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[int, int] = {}
        self._seen, self._points = set[int](), set[int]()
        self._steps = self._lacking = 0
        self.is_off = False

    def step_begins(self) -> None:
        self._seen.clear()
        self._steps, self._lacking = self._steps + 1, 0

    def passes(self, storage: int, saves: int) -> int:
        """The step saves this parameter behind so many save points. Returns behind how many it is planned, or 0."""
        if storage in self._seen or self.is_off:
            return 0
        self._seen.add(storage)
        point = self._known[storage] = max(saves + self._lacking, self._known.get(storage, 0))
        self._points.add(point)
        self._lacking = point - saves
        self.is_off = point > self._most or len(self._known) > MOST_KNOWN
        return point if self._steps > LEARNED_IN and not self.is_off else 0

    def passes_over(self, points: int) -> None:
        """The step leaves out layers with so many save points."""
        self._lacking = max(0, self._lacking - points)

    def may_leave_out_from(self, saves: int, may_leave_out: Callable[[int, int], bool]) -> bool:
        """Whether layers that a step may leave out begin there. Then the first op of another one may come next, and
        when that saves something it is too late to record it.
        """
        is_known = saves in self._points and not self.is_off
        return is_known and any(saves < behind and may_leave_out(saves, behind) for behind in self._points)
