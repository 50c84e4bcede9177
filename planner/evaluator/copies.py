"""The order of both queues: copies out as bytes can be given up, copies back in the order of need (``Fitting``)."""

from __future__ import annotations

from poochplan.planner.problem.arrays import Floats, Ints

from .codes import LATE_OUT_OF_ORDER, ON_DEMAND
from .compiled import part
from .layout import (
    BY_RANK,
    DEATH,
    FREES_TICK,
    OP,
    OUT,
    RANK,
    SAVE_POINT,
    SAVES_BEFORE,
    SIZE,
    TICK,
    USE,
    USE_POINT,
    USE_TICK,
    WORK_S,
    Layout,
)
from .scratch import (
    BACK,
    BLOCK,
    BLOCK_MOST,
    BLOCK_RAISED,
    CURVE,
    DUE,
    DUE_AT,
    DUE_START,
    FETCHED,
    PENDING,
    PREFETCH,
    PREFETCH_START,
    QUEUED,
    QUEUED_AT,
    RELEASE,
    SEGMENT,
    TRIED,
    WANTED,
    Scratch,
)


@part
def sort_by(here: Ints, key: int, items: Ints, count: int, keys: int, start: Ints, found: Ints) -> None:
    """Items by column ``key`` of ``here``, which is below ``keys``; as they come where it is equal.

    Then ``found[start[k] : start[k + 1]]`` are those of key ``k``.
    """
    for k in range(keys + 1):
        start[k] = 0
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
    pending.fill(0)
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
        soon_tick, soon_s = points[soon, TICK], op_s[points[soon, OP], WORK_S]
        now_s = op_s[points[point, OP], WORK_S]
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


@part
def prefetch(layout: Layout, scratch: Scratch, budget_bytes: int, style: int) -> int:
    """Points of the copies back, each as early as memory permits; returns how many there are.

    Copies back begin and end at use points. So what counts is the most that is live between two of them: a *segment*. A
    block of segments is passed, or raised, at once.
    """
    values, points, uses, here = layout.values, layout.points, layout.uses, scratch.values
    count = _order_of_need(len(points), scratch)
    if style != ON_DEMAND:
        _fill_segments(uses, scratch.curves)
    earliest = 0
    for k in range(count):
        value = scratch.orders[FETCHED, k]
        back = points[here[value, BACK], USE]
        use = back
        if style != ON_DEMAND:
            lowest, gone = earliest, max(points[here[value, RELEASE], TICK], values[value, DEATH]) + 1
            if uses[lowest, USE_TICK] < gone:
                lowest = _first_use(uses, gone)
            use = _go_back(scratch.curves, back, lowest, budget_bytes - values[value, SIZE])
            _raise(scratch.curves, use, back, values[value, SIZE])
        here[value, PREFETCH] = uses[use, USE_POINT]
        if style != LATE_OUT_OF_ORDER:
            earliest = use
    return count


@part
def _first_use(uses: Ints, tick: int) -> int:
    """The first use point at ``tick`` or behind it."""
    low, high = 0, len(uses)
    while low < high:
        middle = (low + high) // 2
        if uses[middle, USE_TICK] < tick:
            low = middle + 1
        else:
            high = middle
    return low


@part
def _go_back(curves: Ints, back: int, lowest: int, room: int) -> int:
    """The first use point, from ``lowest`` on, from which to ``back`` no segment has more than ``room``."""
    use = back
    while use > lowest:
        block = (use - 1) // BLOCK
        if use % BLOCK == 0 and use - BLOCK >= lowest and curves[BLOCK_MOST, block] <= room:
            use -= BLOCK
        elif curves[SEGMENT, use - 1] + curves[BLOCK_RAISED, block] <= room:
            use -= 1
        else:
            break
    return use


@part
def _raise(curves: Ints, use: int, back: int, size_bytes: int) -> None:
    """Adds bytes to the segments from ``use`` to ``back``."""
    while use < back:
        block = use // BLOCK
        if use % BLOCK == 0 and use + BLOCK <= back:
            curves[BLOCK_RAISED, block] += size_bytes
            curves[BLOCK_MOST, block] += size_bytes
            use += BLOCK
        else:
            curves[SEGMENT, use] += size_bytes
            curves[BLOCK_MOST, block] = max(
                curves[BLOCK_MOST, block], curves[SEGMENT, use] + curves[BLOCK_RAISED, block]
            )
            use += 1


@part
def _order_of_need(points: int, scratch: Scratch) -> int:
    """Released values that come back, by the points that need them, then by value; returns how many."""
    here, orders, count = scratch.values, scratch.orders, 0
    for value in range(len(here)):
        if here[value, RELEASE] >= 0 and here[value, BACK] >= 0:
            orders[TRIED, count] = value
            count += 1
    sort_by(here, BACK, orders[TRIED], count, points, scratch.starts[PREFETCH_START], orders[FETCHED])
    return count


@part
def _fill_segments(uses: Ints, curves: Ints) -> None:
    """The most from each use point to the next."""
    count = len(uses) - 1
    for block in range(count // BLOCK + 1):
        curves[BLOCK_RAISED, block] = 0
        curves[BLOCK_MOST, block] = 0
    for use in range(count):
        most = curves[CURVE, uses[use, USE_TICK]]
        for tick in range(uses[use, USE_TICK] + 1, uses[use + 1, USE_TICK]):
            most = max(most, curves[CURVE, tick])
        curves[SEGMENT, use] = most
        curves[BLOCK_MOST, use // BLOCK] = max(curves[BLOCK_MOST, use // BLOCK], most)
