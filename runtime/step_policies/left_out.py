"""Layers that a step leaves out of its plan: stochastic depth, LayerDrop, an early exit, fewer iterations of a loop.

The plan is of the longest path. Where a step saves something else than planned, what it saves may be planned behind
some layers. If all that is planned in between is that of whole layers, the step leaves these out, and follows the plan
behind them. Their points count as passed. Values are matched by what they look like, so that of equal layers any may
count as the missing one, until parameters tell them apart (``marks.py``). Then the decisions of one are those of
another, and no bytes change.

Recipes are made from what really ran, so a wrong match costs time or memory, and never bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from poochplan.formats.plan import Instructions, PlannedValue

from .step_policy import Actions


class LeftOut(Exception):  # noqa: N818 - a verdict, caught by the engine
    """The step leaves out some layers: its clock goes on at these positions, and what was planned at the points between
    is carried out now. ``actions``: with the points, as the runtime's clock counts them.
    """

    def __init__(self, saves: int, packs: int, uses: int, actions: Sequence[tuple[int, Actions]]) -> None:
        super().__init__()
        self.saves, self.packs, self.uses, self.actions = saves, packs, uses, actions


class Gaps:
    """Which ranges of a plan's save points may be left out. Each answer is found once."""

    def __init__(self, instructions: Instructions) -> None:
        self._values = instructions.values
        self._paths = [tuple(value.layer.split(".")) if value.layer else () for value in self._values]
        self._known: dict[tuple[int, int], bool] = {}
        first: dict[int, int] = {}
        for ordinal, value in enumerate(instructions.handles):
            first.setdefault(value, ordinal)
        self._packs = len(instructions.handles)
        self._first = first

    def first_handle(self, index: int) -> int:
        """The position of the first handle of the value; behind all of them for the end of forward."""
        return self._first.get(index, self._packs)

    def may_leave_out(self, begin: int, end: int) -> bool:
        """Whether a step may lack the values from one save point to before another. Layers are whole if so many values
        before both places look the same: these are then the ones of the later layer.
        """
        key = begin, end
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._found(begin, end)
        return found

    def _found(self, begin: int, end: int) -> bool:
        while begin >= 0:
            if self._are_whole(begin, end):
                return True
            begin, end = begin - 1, end - 1
            if begin < 0 or not _look_alike(self._values[begin], self._values[end]):
                return False
        return False

    def _are_whole(self, begin: int, end: int) -> bool:
        """Whether the values are all that some calls of layers with one parent save, or that the parent does itself."""
        paths = self._paths[begin:end]
        shared = min(map(len, paths))
        while shared and any(path[:shared] != paths[0][:shared] for path in paths):
            shared -= 1
        return any(self._is_edge(begin, depth) and self._is_edge(end, depth) for depth in range(shared, -1, -1))

    def _is_edge(self, index: int, depth: int) -> bool:
        """Whether a call of a layer below the first ``depth`` names of the path begins or ends there."""
        if index in (0, len(self._paths)):
            return True
        before, behind = self._paths[index - 1], self._paths[index]
        if before[: depth + 1] != behind[: depth + 1] or len(behind) <= depth:
            return True
        return self._is_called_again(index, depth)

    def _is_called_again(self, index: int, depth: int) -> bool:
        """Whether the same layer is called once more: all that its calls save repeats itself from there on."""
        layer, start, end = self._paths[index][: depth + 1], index, index
        while start and self._paths[start - 1][: depth + 1] == layer:
            start -= 1
        while end < len(self._paths) and self._paths[end][: depth + 1] == layer:
            end += 1
        values, paths, many = self._values[start:end], self._paths[start:end], index - start
        again = zip(values, values[many:], paths, paths[many:], strict=False)
        return all(_look_alike(one, two) and path == other for one, two, path, other in again)


def _look_alike(one: PlannedValue, other: PlannedValue) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("dtype", "shape", "size_bytes", "source"))
