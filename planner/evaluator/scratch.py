"""What an evaluation writes to: work arrays, made once per thread, and the replays that were merged so far."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from poochplan.planner.problem.arrays import Bytes, Floats, Ints
from poochplan.planner.schedule.recording import MERGE_GAP_OPS

from .codes import AHEAD, COMPUTING, RECOMPUTE
from .compiled import part
from .layout import (
    BEFORE_S,
    INPUTS,
    INPUTS_END,
    KIND,
    LAST_SAVE_OP,
    OFF,
    ON,
    OP,
    OPS,
    OPS_END,
    RECORD_S,
    RECORDED,
    RECORDED_END,
    SAVE_POINT,
    WORK_S,
    Layout,
)

SLOTS: Final = 1 << 16
"""Of the table of merged replays, which holds half as many before it is cleared."""
POOLED: Final = 1 << 20
"""Targets, inputs and ops that it holds before it is cleared; for large problems more."""

# Columns of Store.entries: the sum of its targets' keys, its begin in the pool, how many targets, inputs and ops lie
# there, and the most bytes that it holds.
SET_KEY, START, TARGETS, SOURCES, RUNS, PEAK = range(6)
# Columns of Store.entry_s: of its ops, of their launches, and how late the thread comes to one of them at most.
OPS_S, LAUNCHES_S, LATE_S = range(3)
ENTRIES, POOL_END, MARK, LEAST_ROOM = range(4)
"""Of ``Store.counts``: how full it is, the last mark given, and what one evaluation can add to the pool."""
CHOSEN, LAST_TOUCH, CHANGE = range(3)
"""Rows of ``Store.merging``: ops of the replay in hand; per value of the profile the last of them that touches it; what
comes and goes at each."""

# Columns of Scratch.values. The point that a replay brings it back at; the last tick at which a replay needs it, and at
# which anything does; the first point that needs it, the last one, and the first that the releases have not passed, as
# rows of Scratch.nodes. All -1 for none.
REPLAYED_AT, CLAIM, END, FIRST_NEED, FINAL_NEED, NEXT_NEED = range(6)
# The points chosen for it: its release, the point that needs it next then, its copy back. Whether the queue has it, the
# save point that its copy must not pass, and its place in the queue.
RELEASE, BACK, PREFETCH, WANTED, DUE_AT, PLACE = range(6, 12)

# Rows of Scratch.orders: values in an order, or what is said of each in it.
TO_REPLAY, RELEASED, FETCHED, TRIED, DUE, QUEUED, QUEUED_AT, PENDING, BY_RELEASE, BY_PREFETCH = range(10)
# Per replay: its point, its entry in the store, the bytes of its targets.
REPLAY_POINT, ENTRY, REPLAY_BYTES = range(10, 13)
# Per place in the queue: whether a release helps the tick in hand; per block of places the bytes of those that do.
HELPS, HELP_OF = 13, 14
BLOCK: Final = 32
DUE_START, RELEASE_START, PREFETCH_START = range(3)
"""Rows of ``Scratch.starts``: where in ``DUE`` those of each save point begin, in the others those of a point."""
NEED_POINT, LATER_NEED, NEEDED = range(3)
"""Columns of ``Scratch.nodes``, which ascend by point; ``NEEDED`` is the value."""
CURVE, MOVES, SEGMENT, BLOCK_MOST, BLOCK_RAISED = range(5)
"""Rows of ``Scratch.curves``: bytes at each tick; what comes and goes there; the most from a use point to the next, and
of each ``BLOCK`` of these; what all of a block was raised by, which its segments do not contain."""
REPLAY_COUNT, NODE_COUNT = range(2)
"""Of ``Scratch.counts``."""

NOW_S, STALL_S, INTERFERENCE_S, RUNTIME_S, LEFT_OUT_S, LEFT_IN_S, TAKEN_S, DONE_S, REPLAYED_S = range(9)
"""Of ``Clock.seconds``; what is left of a copy counts alone on the link, ``TAKEN_S`` is the thread's at points,
``REPLAYED_S`` those of all replays."""
NOW_OUT, NOW_IN, HEAD_OUT, HEAD_IN, END_OUT, END_IN, THREAD_OP = range(7)
"""Of ``Clock.state``: the copy that runs in each queue (-1: none), the next one, and the end; the thread's op."""
IS_OUT, IS_IN, IS_ARRIVING, RELEASE_TICK, BACK_TICK, QUEUE_OUT, QUEUE_IN = range(7)
"""Columns of ``Clock.values``: whether its copies are done, or one back is under way; when it left and came back (-1).
Of the queues the value at each place."""
COMPUTED_S, BEHIND_S = range(2)
"""Columns of ``Clock.op_s``: work before the op, recording included where the thread computes; by how much a thread
that works ahead comes to the op later than a device would that never waits."""


class Store(NamedTuple):
    """Merged replays by their sets of targets; open addressing, cleared when full."""

    counts: Ints
    slots: Ints
    """Entry + 1; 0 for none."""
    entries: Ints
    entry_s: Floats
    pool: Ints
    marks: Ints
    """Per saved value, then per value of the profile, then per op: the last mark it was given."""
    merging: Ints


class Clock(NamedTuple):
    """The compute stream, both queues and the launching thread."""

    seconds: Floats
    state: Ints
    values: Ints
    recorded: Ints
    """Per op and behind the last: ops recorded before it."""
    op_s: Floats


class Scratch(NamedTuple):
    """All of it; for one thread at a time, and one layout."""

    decisions: Bytes
    """After an evaluation: the final decisions, where swaps that memory never asked to release are kept."""
    values: Ints
    orders: Ints
    starts: Ints
    nodes: Ints
    curves: Ints
    counts: Ints
    store: Store
    clock: Clock


def scratch_for(layout: Layout) -> Scratch:
    """New work arrays for evaluations of ``layout``."""
    values, points, ticks = len(layout.values), len(layout.points), len(layout.ticks)
    inputs = int((layout.values[:, INPUTS_END] - layout.values[:, INPUTS]).sum())
    return Scratch(
        decisions=np.zeros(values, dtype=np.int8),
        values=_zeros(values, 12),
        orders=_zeros(15, values),
        starts=_zeros(3, max(points, values) + 1),
        nodes=_zeros(values + inputs, 3),
        curves=_zeros(5, ticks + 1),
        counts=_zeros(2),
        store=_store(layout, values + inputs),
        clock=_clock(layout),
    )


def _store(layout: Layout, least_room: int) -> Store:
    ops, values = len(layout.ops), len(layout.value_bytes)
    if layout.facts[KIND] == AHEAD:
        least_room += int((layout.values[:, OPS_END] - layout.values[:, OPS]).sum())
    slots = SLOTS
    while slots < 4 * len(layout.values):
        slots *= 2
    counts = _zeros(4)
    counts[LEAST_ROOM] = least_room
    return Store(
        counts=counts,
        slots=_zeros(slots),
        entries=np.empty((slots // 2, 6), dtype=np.int64),
        entry_s=np.empty((slots // 2, 3)),
        pool=np.empty(max(POOLED, 4 * least_room), dtype=np.int64),
        marks=_zeros(len(layout.values) + values + ops),
        merging=_zeros(3, max(ops, values) + 2),
    )


def _clock(layout: Layout) -> Clock:
    rows = len(layout.op_s)
    return Clock(np.zeros(9), _zeros(7), _zeros(len(layout.values), 7), _zeros(rows), np.zeros((rows, 2)))


def _zeros(*shape: int) -> Ints:
    return np.zeros(shape, dtype=np.int64)


# -- the begin of a step ---------------------------------------------------------------------------------------------


@part
def start_clock(layout: Layout, decisions: Bytes, clock: Clock) -> None:
    """Puts the clock to the begin of a step in which the thread records what ``decisions`` ask for."""
    rates, op_s, recorded, kind = layout.rates, layout.op_s, clock.recorded, layout.facts[KIND]
    clock.seconds.fill(0.0)
    clock.state.fill(0)
    clock.state[NOW_OUT] = -1
    clock.state[NOW_IN] = -1
    for value in range(len(clock.values)):
        clock.values[value, IS_OUT] = 0
        clock.values[value, IS_IN] = 0
        clock.values[value, IS_ARRIVING] = 0
        clock.values[value, RELEASE_TICK] = -1
        clock.values[value, BACK_TICK] = -1
    record_s = rates[RECORD_S]
    if record_s > 0.0:
        _record(layout, decisions, recorded)
    for op in range(len(op_s)):
        clock.op_s[op, COMPUTED_S] = op_s[op, WORK_S]
        if kind == COMPUTING:
            clock.op_s[op, COMPUTED_S] += record_s * recorded[op]
    if kind == AHEAD:
        for op in range(len(op_s) - 1):
            launched_s = op_s[op, BEFORE_S] + record_s * recorded[op] + record_s * (recorded[op + 1] - recorded[op])
            clock.op_s[op, BEHIND_S] = launched_s - op_s[op, WORK_S]


@part
def _record(layout: Layout, decisions: Bytes, recorded: Ints) -> None:
    """Ops recorded before each op, and in all (``recording_of``, ``recorded_before``)."""
    values, lists, ops, points = layout.values, layout.lists, layout.ops, layout.points
    recorded.fill(0)
    for value in range(len(values)):
        if decisions[value] == RECOMPUTE:
            for k in range(values[value, RECORDED], values[value, RECORDED_END]):
                recorded[lists[k]] = 1
    begin, end = -2, -1  # no window yet
    for op in range(len(ops)):
        if recorded[op] > 0:
            recorded[op] = 0
            on = ops[op, ON]
            if begin == -2:
                begin = on
            elif on >= 0 and end < len(values):
                gap = points[values[on, SAVE_POINT], OP] - points[values[end, SAVE_POINT], OP]
                if gap >= MERGE_GAP_OPS:
                    _switch(layout, recorded, begin, end)
                    begin = on
            end = ops[op, OFF]
    if begin > -2:
        _switch(layout, recorded, begin, end)
    done = 0
    for op in range(len(recorded)):
        was = recorded[op]
        recorded[op] = done
        if was < 0:
            done += 1


@part
def _switch(layout: Layout, recorded: Ints, begin: int, end: int) -> None:
    """Marks (-1) the ops between two save points, or the step's begin and recording's end."""
    values, points = layout.values, layout.points
    first = points[values[begin, SAVE_POINT], OP] if begin >= 0 else 0
    last = points[values[end, SAVE_POINT], OP] if end < len(values) else layout.facts[LAST_SAVE_OP]
    for op in range(first, last):
        recorded[op] = -1
