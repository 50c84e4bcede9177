"""Where swapped values are given up and fetched, so that memory stays within the budget (``Fitting``)."""

from __future__ import annotations

from poochplan.planner.problem.arrays import Bytes, Ints

from .codes import LATE_OUT_OF_ORDER, ON_DEMAND, RECOMPUTE, SWAP
from .compiled import compiled
from .copies import sort_by
from .layout import Layout, Points, Uses, Values
from .scratch import REPLAYS, Chosen, Needed, Store


@compiled
def put(change: Ints, first: int, last: int, size_bytes: int) -> None:
    """Has bytes live from tick ``first`` to ``last`` in differences of ticks (``occupancy``)."""
    ticks = len(change) - 1
    start = min(first, ticks)
    change[start] += size_bytes
    change[min(max(last + 1, start), ticks)] -= size_bytes


@compiled
def lay_curve(layout: Layout, decisions: Bytes, needed: Needed, store: Store, chosen: Chosen) -> None:
    """Bytes live at each tick if no swapped value leaves, inside replays included."""
    values, points, curve, change = layout.values, layout.points, chosen.curve, chosen.change
    change[:] = 0
    for value in range(layout.value_count):
        size_bytes = values.size_bytes[value]
        if decisions[value] != RECOMPUTE:
            put(change, values.born[value], max(values.death[value], needed.end[value]), size_bytes)
            continue
        put(change, values.born[value], values.death[value], size_bytes)
        if needed.back_point[value] >= 0:
            put(change, points.tick[needed.back_point[value]], needed.end[value], size_bytes)
    live = 0
    for tick in range(layout.tick_count):
        live += change[tick]
        curve[tick] = live + layout.base_bytes[tick]
    for run in range(needed.counts[REPLAYS]):
        extra = store.peak_bytes[needed.entry[run]] - needed.bytes[run]
        if extra > 0:
            curve[points.tick[needed.replay_point[run]]] += extra


@compiled
def release_early(layout: Layout, decisions: Bytes, needed: Needed, chosen: Chosen) -> int:
    """Releases every swapped value as soon as forward lets go of it; returns how many."""
    count = 0
    chosen.change[:] = 0
    for value in range(layout.value_count):
        if decisions[value] == SWAP:
            _release(layout, needed, chosen, value, layout.values.early_point[value], count)
            count += 1
    _apply(chosen)
    return count


@compiled
def release_late(layout: Layout, budget_bytes: int, needed: Needed, chosen: Chosen, waiting: int) -> int:
    """Releases the first ``waiting`` of ``chosen.queued`` where memory asks for it; returns how many."""
    points, curve, change = layout.points, chosen.curve, chosen.change
    for position in range(waiting):
        chosen.next[position] = position + 1
    head, count, moved, point = 0, 0, 0, -1
    needed.next_need[:] = needed.first
    change[:] = 0
    for tick in range(layout.tick_count):
        moved += change[tick]
        over_bytes = curve[tick] + moved - budget_bytes
        if over_bytes <= 0:
            continue
        while point + 1 < len(points.tick) and points.tick[point + 1] <= tick:
            point += 1
        head, tried, helped = _find_help(layout, needed, chosen, head, waiting, tick, point, over_bytes)
        helped = _take_back(layout.values, chosen, tried, helped, over_bytes)
        for value in chosen.tried[:tried]:
            if value >= 0:
                _release(layout, needed, chosen, value, point, count)
                count += 1
        moved -= helped
        if over_bytes > helped:
            # These decisions do not fit: release the rest early, so that what is missing is exact.
            for value in chosen.queued[:waiting]:
                if chosen.release[value] < 0:
                    _release(layout, needed, chosen, value, layout.values.early_point[value], count)
                    count += 1
            break
    _apply(chosen)
    return count


@compiled
def _find_help(
    layout: Layout, needed: Needed, chosen: Chosen, head: int, waiting: int, tick: int, point: int, over_bytes: int
) -> tuple[int, int, int]:
    """Tries from the front of the queue until ``tick`` fits: the queue's new front, how many were tried, bytes."""
    values, tried, helped = layout.values, 0, 0
    before, position = -1, head
    while position < waiting:
        value, after = chosen.queued[position], chosen.next[position]
        node = _need_after(needed, needed.next_need[value], point)
        needed.next_need[value] = node  # points that ask only ascend
        last = _absent_until(layout, needed, value, node)
        if chosen.release[value] >= 0 or (node < 0 and last < tick):  # it is gone, or will never help
            if before < 0:
                head = after
            else:
                chosen.next[before] = after
        else:
            before = position
            if values.death[value] < tick and values.save_point[value] <= point and tick <= last:
                chosen.tried[tried] = value
                tried += 1
                helped += values.size_bytes[value]
                if helped >= over_bytes:
                    break
        position = after
    return head, tried, helped


@compiled
def _take_back(values: Values, chosen: Chosen, tried: int, helped: int, over_bytes: int) -> int:
    """Takes out of ``chosen.tried`` (-1) what turns out not to be needed, from its end; returns the bytes of the rest.

    The last in the queue is waited for the longest.
    """
    for k in range(tried - 2, -1, -1):
        size_bytes = values.size_bytes[chosen.tried[k]]
        if helped - size_bytes >= over_bytes:
            helped -= size_bytes
            chosen.tried[k] = -1
    return helped


@compiled
def _release(layout: Layout, needed: Needed, chosen: Chosen, value: int, point: int, count: int) -> None:
    node = _need_after(needed, needed.first[value], point)
    last = _absent_until(layout, needed, value, node)
    first = max(layout.values.death[value] + 1, layout.points.tick[point])
    if last >= first:
        put(chosen.change, first, last, -layout.values.size_bytes[value])
    chosen.back[value] = needed.node_point[node] if node >= 0 else -1
    chosen.release[value] = point
    chosen.released[count] = value


@compiled
def _need_after(needed: Needed, node: int, point: int) -> int:
    """The first need at ``point`` or behind it, from ``node`` on; -1 when there is none."""
    while node >= 0 and needed.node_point[node] < point:
        node = needed.node_next[node]
    return node


@compiled
def _absent_until(layout: Layout, needed: Needed, value: int, node: int) -> int:
    """Last tick at which a value stays away that is needed at ``node`` next; -1 when it must not leave any more."""
    if node >= 0:
        last: int = layout.points.tick[needed.node_point[node]] - 1
        return last
    if layout.values.first_use_point[value] >= 0:
        return -1
    held: int = min(max(layout.values.death[value], needed.end[value]), layout.tick_count - 1)
    return held


@compiled
def _apply(chosen: Chosen) -> None:
    moved = 0
    for tick in range(len(chosen.curve)):
        moved += chosen.change[tick]
        chosen.curve[tick] += moved


@compiled
def prefetch(
    points: Points, values: Values, uses: Uses, chosen: Chosen, released: int, budget_bytes: int, style: int
) -> int:
    """Points of the copies back, in the order of need, as early as memory permits; returns how many.

    Copies back begin and end at use points. So what counts is the most that is live between two of them.
    """
    count = _order_of_need(points, uses, chosen, released)
    _fill_segments(uses, chosen)
    segment, ticks = chosen.segment, uses.tick
    earliest = ticks[0]
    for value in chosen.fetched[:count]:
        back = points.use[chosen.back[value]]
        use = back
        if style != ON_DEMAND:
            size_bytes = values.size_bytes[value]
            lowest = max(earliest, max(points.tick[chosen.release[value]], values.death[value]) + 1)
            room = budget_bytes - size_bytes
            while use > 0 and ticks[use - 1] >= lowest and segment[use - 1] <= room:
                use -= 1
            segment[use:back] += size_bytes
        chosen.prefetch[value] = uses.point[use]
        if style != LATE_OUT_OF_ORDER:
            earliest = ticks[use]
    return count


@compiled
def _order_of_need(points: Points, uses: Uses, chosen: Chosen, released: int) -> int:
    """Fills ``chosen.fetched``: released values that come back, by the points that need them, then by value."""
    count = 0
    chosen.wanted[:] = False
    for value in chosen.released[:released]:
        chosen.wanted[value] = chosen.back[value] >= 0
    for value in range(len(chosen.wanted)):
        if chosen.wanted[value]:
            chosen.tried[count] = value
            count += 1
    sort_by(chosen.back, chosen.tried, count, chosen.prefetch_start, chosen.fetched)
    return count


@compiled
def _fill_segments(uses: Uses, chosen: Chosen) -> None:
    for use in range(len(uses.tick) - 1):
        most = chosen.curve[uses.tick[use]]
        for tick in range(uses.tick[use] + 1, uses.tick[use + 1]):
            most = max(most, chosen.curve[tick])
        chosen.segment[use] = most
