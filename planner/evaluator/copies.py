"""The order of the queue outwards, and values sorted by points."""

from __future__ import annotations

from poochplan.planner.problem.arrays import Flags, Ints

from .compiled import compiled
from .layout import Points, Values
from .scratch import Chosen


@compiled
def sort_by(key: Ints, items: Ints, count: int, start: Ints, found: Ints) -> None:
    """Items by their keys, which are below ``len(start) - 1``; as they come where keys are equal.

    Then ``found[start[k] : start[k + 1]]`` are those of key ``k``.
    """
    start[:] = 0
    for item in items[:count]:
        start[key[item] + 1] += 1
    for k in range(1, len(start)):
        start[k] += start[k - 1]
    for item in items[:count]:
        place = start[key[item]]
        found[place] = item
        start[key[item]] = place + 1
    for k in range(len(start) - 1, 0, -1):
        start[k] = start[k - 1]
    start[0] = 0


@compiled
def queue_out(points: Points, values: Values, chosen: Chosen, is_released: bool) -> int:
    """Fills ``chosen.queued`` and ``queued_at`` with the ``chosen.wanted`` in the order of the queue; returns how many.

    A copy is queued at its save point, unless its bytes cannot be given up for long: a value that forward still holds
    lets the others go first, as long as the link is busy. None is queued after its release.
    """
    _find_due(points, values, chosen, is_released)
    pending, wanted, last = chosen.pending, chosen.wanted, len(chosen.wanted) - 1
    pending[:] = False
    waiting, count, low, link_free_s = 0, 0, last + 1, 0.0
    for index in range(last + 1):
        point = values.save_point[index]
        if wanted[index]:
            pending[values.rank[index]] = True
            low = min(low, values.rank[index])
            waiting += 1
        if waiting == 0:
            continue
        soon = len(points.tick) - 1 if index == last else values.save_point[index + 1]
        soon_tick, soon_s, now_s = points.tick[soon], points.work_s[soon], points.work_s[point]
        while waiting > 0:
            while not pending[low]:
                low += 1
            value = values.by_rank[low]
            if index != last and values.frees_tick[value] > soon_tick and link_free_s > soon_s:
                break
            pending[low] = False
            link_free_s = max(link_free_s, now_s) + values.out_s[value]
            count = _enqueue(chosen, value, point, count)
            waiting -= 1
        for k in range(chosen.due_start[index], chosen.due_start[index + 1]):
            value = chosen.due[k]
            if pending[values.rank[value]]:
                pending[values.rank[value]] = False
                link_free_s = max(link_free_s, now_s) + values.out_s[value]
                count = _enqueue(chosen, value, point, count)
                waiting -= 1
    return count


@compiled
def _enqueue(chosen: Chosen, value: int, point: int, count: int) -> int:
    chosen.queued[count] = value
    chosen.queued_at[count] = point
    return count + 1


@compiled
def _find_due(points: Points, values: Values, chosen: Chosen, is_released: bool) -> None:
    """Fills ``chosen.due``: by the save point that must not be passed, the released values in the order of rank."""
    count = 0
    if is_released:
        for value in values.by_rank:
            if chosen.wanted[value]:
                chosen.place[value] = max(value, points.saves_before[chosen.release[value]] - 1)
                chosen.tried[count] = value
                count += 1
    sort_by(chosen.place, chosen.tried, count, chosen.due_start, chosen.due)


@compiled
def want(wanted: Flags, items: Ints, count: int) -> None:
    """Flags the first ``count`` items."""
    wanted[:] = False
    for item in items[:count]:
        wanted[item] = True
