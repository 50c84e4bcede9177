"""The order of the queue outwards, and values sorted by points."""

from __future__ import annotations

from poochplan.planner.problem.arrays import Floats, Ints

from .compiled import part
from .layout import BY_RANK, FREES_TICK, OUT, RANK, SAVE_POINT, SAVES_BEFORE, TICK, WORK_S, Layout
from .layout import OP as OP_OF
from .scratch import DUE, DUE_AT, DUE_START, PENDING, QUEUED, QUEUED_AT, RELEASE, TRIED, WANTED, Scratch


@part
def sort_by(here: Ints, key: int, items: Ints, count: int, keys: int, start: Ints, found: Ints) -> None:
    """Items by column ``key`` of ``here``, which is below ``keys``; as they come where it is equal.

    Then ``found[start[k] : start[k + 1]]`` are those of key ``k``.
    """
    start[: keys + 1] = 0
    for i in range(count):
        start[here[items[i], key] + 1] += 1
    for k in range(1, keys + 1):
        start[k] += start[k - 1]
    for i in range(count):
        place = start[here[items[i], key]]
        found[place] = items[i]
        start[here[items[i], key]] = place + 1
    for k in range(keys, 0, -1):
        start[k] = start[k - 1]
    start[0] = 0


@part
def queue_out(layout: Layout, scratch: Scratch, is_released: bool) -> int:
    """Puts what is ``WANTED`` into the order of the queue, with the points at which it is queued; returns how many.

    A copy is queued at its save point, unless its bytes cannot be given up for long: a value that forward still holds
    lets the others go first, as long as the link is busy. None is queued after its release.
    """
    _find_due(layout, scratch.values, scratch.orders, scratch.starts[DUE_START], is_released)
    values, points, copy_s, op_s = layout.values, layout.points, layout.copy_s, layout.op_s
    here, orders, start = scratch.values, scratch.orders, scratch.starts[DUE_START]
    pending = orders[PENDING]
    pending[:] = 0
    last = len(values) - 1
    count, waiting, low, link_free_s = 0, 0, last + 1, 0.0
    for index in range(last + 1):
        point = values[index, SAVE_POINT]
        if here[index, WANTED]:
            pending[values[index, RANK]] = 1
            low = min(low, values[index, RANK])
            waiting += 1
        if waiting == 0:
            continue
        soon = len(points) - 1 if index == last else values[index + 1, SAVE_POINT]
        soon_tick, soon_s = points[soon, TICK], op_s[points[soon, OP_OF], WORK_S]
        now_s = op_s[points[point, OP_OF], WORK_S]
        while waiting > 0:
            while not pending[low]:
                low += 1
            value = values[low, BY_RANK]
            if index != last and values[value, FREES_TICK] > soon_tick and link_free_s > soon_s:
                break
            link_free_s = _enqueue(orders, copy_s, value, low, point, count, max(link_free_s, now_s))
            count += 1
            waiting -= 1
        for k in range(start[index], start[index + 1]):
            value = orders[DUE, k]
            rank = values[value, RANK]
            if pending[rank]:
                link_free_s = _enqueue(orders, copy_s, value, rank, point, count, max(link_free_s, now_s))
                count += 1
                waiting -= 1
    return count


@part
def _enqueue(orders: Ints, copy_s: Floats, value: int, rank: int, point: int, place: int, link_free_s: float) -> float:
    """Returns when the link is free again."""
    orders[PENDING, rank] = 0
    orders[QUEUED, place] = value
    orders[QUEUED_AT, place] = point
    free_s: float = link_free_s + copy_s[value, OUT]
    return free_s


@part
def _find_due(layout: Layout, here: Ints, orders: Ints, start: Ints, is_released: bool) -> None:
    """By the save point that their copies must not pass, the released values in the order of rank."""
    values, count = layout.values, 0
    if is_released:
        for rank in range(len(values)):
            value = values[rank, BY_RANK]
            if here[value, WANTED]:
                here[value, DUE_AT] = max(value, layout.points[here[value, RELEASE], SAVES_BEFORE] - 1)
                orders[TRIED, count] = value
                count += 1
    sort_by(here, DUE_AT, orders[TRIED], count, len(values), start, orders[DUE])
