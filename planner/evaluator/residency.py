"""Where swapped values are given up, so that memory stays within the budget (``Fitting``)."""

from __future__ import annotations

from poochplan.planner.problem.arrays import Bytes, Ints

from .codes import RECOMPUTE, SWAP
from .compiled import part
from .layout import (
    BASE,
    BORN,
    BY_RANK,
    DEATH,
    EARLY_POINT,
    FIRST_USE,
    FREES_TICK,
    SAVE_POINT,
    SIZE,
    TICK,
    UNUSED,
    UNUSED_END,
    Layout,
)
from .scratch import (
    BACK,
    BLOCK,
    CURVE,
    END,
    ENTRY,
    FIRST_NEED,
    HELP_OF,
    HELPS,
    LATER_NEED,
    MOVES,
    NEED_POINT,
    NEEDED,
    NEXT_NEED,
    NODE_COUNT,
    PEAK,
    PLACE,
    QUEUED,
    RELEASE,
    RELEASED,
    REPLAY_BYTES,
    REPLAY_COUNT,
    REPLAY_POINT,
    REPLAYED_AT,
    TRIED,
    WANTED,
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
    moves.fill(0)
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
    scratch.curves[MOVES].fill(0)
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
    _start_helping(layout, scratch, waiting)
    count, moved, point, died = 0, 0, -1, 0
    needed = passed = 0
    moves.fill(0)
    for tick in range(len(layout.ticks)):
        moved += moves[tick]
        over_bytes = curve[tick] + moved - budget_bytes
        if over_bytes <= 0:
            continue
        while point + 1 < len(points) and points[point + 1, TICK] <= tick:
            point += 1
        died, needed, passed = _update_help(layout, scratch, tick, point, died, needed, passed)
        tried, helped = _find_help(values, scratch.values, orders, waiting, over_bytes)
        for k in range(tried):
            _stop_helping(values, scratch.values, orders, orders[TRIED, k])
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
def _start_helping(layout: Layout, scratch: Scratch, waiting: int) -> None:
    here, orders = scratch.values, scratch.orders
    orders[HELPS].fill(0)
    orders[HELP_OF].fill(0)
    for place in range(waiting):
        value = orders[QUEUED, place]
        here[value, PLACE] = place
        here[value, NEXT_NEED] = here[value, FIRST_NEED]


@part
def _update_help(
    layout: Layout, scratch: Scratch, tick: int, point: int, died: int, needed: int, passed: int
) -> tuple[int, int, int]:
    """Which values a release at ``point`` would take away at ``tick``; later ticks go on with what is returned.

    It changes only where forward lets go of a value, at a point that needs it, behind that point, and where one that
    backward never uses is gone anyway.
    """
    values, nodes, nodes_end = layout.values, scratch.nodes, scratch.counts[NODE_COUNT]
    while died < len(values) and values[values[died, BY_RANK], FREES_TICK] <= tick:
        _refresh(layout, scratch, values[died, BY_RANK], tick, point)
        died += 1
    while needed < nodes_end and nodes[needed, NEED_POINT] <= point:
        _refresh(layout, scratch, nodes[needed, NEEDED], tick, point)
        needed += 1
    while passed < nodes_end and nodes[passed, NEED_POINT] < point:
        _refresh(layout, scratch, nodes[passed, NEEDED], tick, point)
        passed += 1
    for k in range(layout.facts[UNUSED], layout.facts[UNUSED_END]):
        _refresh(layout, scratch, layout.lists[k], tick, point)
    return died, needed, passed


@part
def _refresh(layout: Layout, scratch: Scratch, value: int, tick: int, point: int) -> None:
    """Notes whether a release of the value at ``point`` would take it away at ``tick``."""
    values, here, orders = layout.values, scratch.values, scratch.orders
    if not here[value, WANTED] or here[value, RELEASE] >= 0:
        return
    node = _need_after(scratch.nodes, here[value, NEXT_NEED], point)
    here[value, NEXT_NEED] = node  # points that ask only ascend
    last = _absent_until(layout, here, scratch.nodes, value, node)
    helps = values[value, DEATH] < tick and values[value, SAVE_POINT] <= point and tick <= last
    _stop_helping(values, here, orders, value)
    if helps:
        place = here[value, PLACE]
        orders[HELPS, place] = 1
        orders[HELP_OF, place // BLOCK] += values[value, SIZE]


@part
def _stop_helping(values: Ints, here: Ints, orders: Ints, value: int) -> None:
    place = here[value, PLACE]
    if orders[HELPS, place]:
        orders[HELPS, place] = 0
        orders[HELP_OF, place // BLOCK] -= values[value, SIZE]


@part
def _find_help(values: Ints, here: Ints, orders: Ints, waiting: int, over_bytes: int) -> tuple[int, int]:
    """What is released from the front of the queue until a tick fits: how many, their bytes.

    Then goes back over them, but for the last, and lets stay what turns out not to be needed: what is behind in the
    queue is waited for the longest. A block of the queue is passed at once where all of it does, or stays.
    """
    helped, place = 0, 0
    while place < waiting and helped + orders[HELP_OF, place // BLOCK] < over_bytes:
        helped += orders[HELP_OF, place // BLOCK]
        place += BLOCK
    if place >= waiting:
        return _all_that_helps(orders, waiting), helped
    while helped < over_bytes:
        if orders[HELPS, place]:
            helped += values[orders[QUEUED, place], SIZE]
        place += 1
    spare, place = helped - over_bytes, place - 1
    orders[TRIED, 0] = orders[QUEUED, place]
    count, place = 1, place - 1
    while place >= 0:
        if place % BLOCK == BLOCK - 1 and orders[HELP_OF, place // BLOCK] <= spare:
            spare -= orders[HELP_OF, place // BLOCK]
            place -= BLOCK
            continue
        if orders[HELPS, place]:
            size_bytes = values[orders[QUEUED, place], SIZE]
            if size_bytes <= spare:
                spare -= size_bytes
            else:
                orders[TRIED, count] = orders[QUEUED, place]
                count += 1
        place -= 1
    for k in range(count // 2):
        first, last = orders[TRIED, k], orders[TRIED, count - 1 - k]
        orders[TRIED, k] = last
        orders[TRIED, count - 1 - k] = first
    return count, over_bytes + spare


@part
def _all_that_helps(orders: Ints, waiting: int) -> int:
    count = 0
    for place in range(waiting):
        if orders[HELPS, place]:
            orders[TRIED, count] = orders[QUEUED, place]
            count += 1
    return count


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
