"""Where swapped values are given up and fetched, so that memory stays within the budget (``Fitting``)."""

from __future__ import annotations

from poochplan.planner.problem.arrays import Bytes, Ints

from .codes import LATE_OUT_OF_ORDER, ON_DEMAND, RECOMPUTE, SWAP
from .compiled import part
from .copies import sort_by
from .layout import (
    BASE,
    BORN,
    DEATH,
    EARLY_POINT,
    FIRST_USE,
    SAVE_POINT,
    SIZE,
    TICK,
    USE,
    USE_POINT,
    USE_TICK,
    Layout,
)
from .scratch import (
    AFTER,
    BACK,
    CURVE,
    END,
    ENTRY,
    FETCHED,
    FIRST_NEED,
    LATER_NEED,
    MOVES,
    NEED_POINT,
    NEXT_NEED,
    PEAK,
    PREFETCH,
    PREFETCH_START,
    QUEUED,
    RELEASE,
    RELEASED,
    REPLAY_BYTES,
    REPLAY_COUNT,
    REPLAY_POINT,
    REPLAYED_AT,
    SEGMENT,
    TRIED,
    Scratch,
)


@part
def put(moves: Ints, ticks: int, first: int, last: int, size_bytes: int) -> None:
    """Has bytes live from tick ``first`` to ``last`` in what comes and goes at each of ``ticks`` (``occupancy``)."""
    start = min(first, ticks)
    moves[start] += size_bytes
    moves[min(max(last + 1, start), ticks)] -= size_bytes


@part
def lay_curve(layout: Layout, decisions: Bytes, scratch: Scratch) -> None:
    """Bytes live at each tick if no swapped value leaves, inside replays included."""
    values, points, here, orders = layout.values, layout.points, scratch.values, scratch.orders
    curve, moves, ticks = scratch.curves[CURVE], scratch.curves[MOVES], len(layout.ticks)
    moves[:] = 0
    for value in range(len(values)):
        size_bytes, death, replayed_at = values[value, SIZE], values[value, DEATH], here[value, REPLAYED_AT]
        is_away = decisions[value] == RECOMPUTE
        put(moves, ticks, values[value, BORN], death if is_away else max(death, here[value, END]), size_bytes)
        if is_away and replayed_at >= 0:
            put(moves, ticks, points[replayed_at, TICK], here[value, END], size_bytes)
    live = 0
    for tick in range(ticks):
        live += moves[tick]
        curve[tick] = live + layout.ticks[tick, BASE]
    for run in range(scratch.counts[REPLAY_COUNT]):
        extra = scratch.store.entries[orders[ENTRY, run], PEAK] - orders[REPLAY_BYTES, run]
        if extra > 0:
            curve[points[orders[REPLAY_POINT, run], TICK]] += extra


@part
def release_early(layout: Layout, decisions: Bytes, scratch: Scratch) -> int:
    """Releases every swapped value as soon as forward lets go of it; returns how many."""
    count = 0
    scratch.curves[MOVES, :] = 0
    for value in range(len(layout.values)):
        if decisions[value] == SWAP:
            _release(layout, scratch, value, layout.values[value, EARLY_POINT], count)
            count += 1
    _apply(scratch.curves[CURVE], scratch.curves[MOVES])
    return count


@part
def release_late(layout: Layout, scratch: Scratch, budget_bytes: int, waiting: int) -> int:
    """Releases of the first ``waiting`` in the queue where memory asks for it; returns how many."""
    points, orders, values = layout.points, scratch.orders, layout.values
    curve, moves = scratch.curves[CURVE], scratch.curves[MOVES]
    for place in range(waiting):
        orders[AFTER, place] = place + 1
        scratch.values[orders[QUEUED, place], NEXT_NEED] = scratch.values[orders[QUEUED, place], FIRST_NEED]
    head, count, moved, point = 0, 0, 0, -1
    moves[:] = 0
    for tick in range(len(layout.ticks)):
        moved += moves[tick]
        over_bytes = curve[tick] + moved - budget_bytes
        if over_bytes <= 0:
            continue
        while point + 1 < len(points) and points[point + 1, TICK] <= tick:
            point += 1
        head, tried, helped = _find_help(layout, scratch, head, waiting, tick, point, over_bytes)
        helped = _take_back(values, orders[TRIED], tried, helped, over_bytes)
        for k in range(tried):
            if orders[TRIED, k] >= 0:
                _release(layout, scratch, orders[TRIED, k], point, count)
                count += 1
        moved -= helped
        if over_bytes > helped:
            # These decisions do not fit: release the rest early, so that what is missing is exact.
            for place in range(waiting):
                value = orders[QUEUED, place]
                if scratch.values[value, RELEASE] < 0:
                    _release(layout, scratch, value, values[value, EARLY_POINT], count)
                    count += 1
            break
    _apply(curve, moves)
    return count


@part
def _find_help(
    layout: Layout, scratch: Scratch, head: int, waiting: int, tick: int, point: int, over_bytes: int
) -> tuple[int, int, int]:
    """Tries from the front of the queue until ``tick`` fits: the queue's new front, how many were tried, bytes."""
    values, here, orders, nodes = layout.values, scratch.values, scratch.orders, scratch.nodes
    tried, helped, before, place = 0, 0, -1, head
    while place < waiting and helped < over_bytes:
        value, after = orders[QUEUED, place], orders[AFTER, place]
        node = _need_after(nodes, here[value, NEXT_NEED], point)
        here[value, NEXT_NEED] = node  # points that ask only ascend
        last = _absent_until(layout, here, nodes, value, node)
        if here[value, RELEASE] >= 0 or (node < 0 and last < tick):  # it is gone, or will never help
            if before < 0:
                head = after
            else:
                orders[AFTER, before] = after
        else:
            before = place
            if values[value, DEATH] < tick and values[value, SAVE_POINT] <= point and tick <= last:
                orders[TRIED, tried] = value
                tried += 1
                helped += values[value, SIZE]
        place = after
    return head, tried, helped


@part
def _take_back(values: Ints, tried: Ints, count: int, helped: int, over_bytes: int) -> int:
    """Takes out of ``tried`` (-1) what turns out not to be needed, from its end; returns the bytes of the rest.

    The last in the queue is waited for the longest.
    """
    for k in range(count - 2, -1, -1):
        size_bytes = values[tried[k], SIZE]
        if helped - size_bytes >= over_bytes:
            helped -= size_bytes
            tried[k] = -1
    return helped


@part
def _release(layout: Layout, scratch: Scratch, value: int, point: int, count: int) -> None:
    values, here, nodes = layout.values, scratch.values, scratch.nodes
    node = _need_after(nodes, here[value, FIRST_NEED], point)
    last = _absent_until(layout, here, nodes, value, node)
    first = max(values[value, DEATH] + 1, layout.points[point, TICK])
    if last >= first:
        put(scratch.curves[MOVES], len(layout.ticks), first, last, -values[value, SIZE])
    here[value, BACK] = nodes[node, NEED_POINT] if node >= 0 else -1
    here[value, RELEASE] = point
    scratch.orders[RELEASED, count] = value


@part
def _need_after(nodes: Ints, node: int, point: int) -> int:
    """The first need at ``point`` or behind it, from ``node`` on; -1 when there is none."""
    while node >= 0 and nodes[node, NEED_POINT] < point:
        node = nodes[node, LATER_NEED]
    return node


@part
def _absent_until(layout: Layout, here: Ints, nodes: Ints, value: int, node: int) -> int:
    """Last tick at which a value stays away that is needed at ``node`` next; -1 when it must not leave any more."""
    if node >= 0:
        return int(layout.points[nodes[node, NEED_POINT], TICK] - 1)
    if layout.values[value, FIRST_USE] >= 0:
        return -1
    return int(min(max(layout.values[value, DEATH], here[value, END]), len(layout.ticks) - 1))


@part
def _apply(curve: Ints, moves: Ints) -> None:
    moved = 0
    for tick in range(len(curve)):
        moved += moves[tick]
        curve[tick] += moved


@part
def prefetch(layout: Layout, scratch: Scratch, budget_bytes: int, style: int) -> int:
    """Points of the copies back, in the order of need, as early as memory permits; returns how many.

    Copies back begin and end at use points. So what counts is the most that is live between two of them.
    """
    values, points, uses, here = layout.values, layout.points, layout.uses, scratch.values
    count = _order_of_need(len(points), scratch)
    _fill_segments(uses, scratch.curves[CURVE], scratch.curves[SEGMENT])
    segment, fetched = scratch.curves[SEGMENT], scratch.orders[FETCHED]
    earliest = uses[0, USE_TICK]
    for k in range(count):
        value = fetched[k]
        back = points[here[value, BACK], USE]
        use = back
        if style != ON_DEMAND:
            room = budget_bytes - values[value, SIZE]
            lowest = max(earliest, max(points[here[value, RELEASE], TICK], values[value, DEATH]) + 1)
            while use > 0 and segment[use - 1] <= room and uses[use - 1, USE_TICK] >= lowest:
                use -= 1
            for i in range(use, back):
                segment[i] += values[value, SIZE]
        here[value, PREFETCH] = uses[use, USE_POINT]
        if style != LATE_OUT_OF_ORDER:
            earliest = uses[use, USE_TICK]
    return count


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
def _fill_segments(uses: Ints, curve: Ints, segment: Ints) -> None:
    for use in range(len(uses) - 1):
        most = curve[uses[use, USE_TICK]]
        for tick in range(uses[use, USE_TICK] + 1, uses[use + 1, USE_TICK]):
            most = max(most, curve[tick])
        segment[use] = most
