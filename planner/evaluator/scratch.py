"""What an evaluation writes to: work arrays, made once per thread, and the replays that were merged so far."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from poochplan.planner.problem.arrays import Bytes, Floats, Ints

from .codes import AHEAD
from .layout import INPUTS, INPUTS_END, KIND, OPS, OPS_END, Layout

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
"""Rows of ``Store.merging``: ops of the replay in hand; per value of the profile the last of them that touches it; bytes
that come and go at each."""

# Columns of Scratch.values. The point that a replay brings it back at; the last tick at which a replay needs it, and at
# which anything does; the first point that needs it, the last one, and the first that the releases have not passed, as
# rows of Scratch.nodes. All -1 for none.
REPLAYED_AT, CLAIM, END, FIRST_NEED, FINAL_NEED, NEXT_NEED = range(6)
# The points chosen for it: its release, the point that needs it next then, its copy back. Whether the queue has it, and
# the save point that its copy must not pass.
RELEASE, BACK, PREFETCH, WANTED, DUE_AT = range(6, 11)

# Rows of Scratch.orders: values in an order, or what is said of each in it.
TO_REPLAY, RELEASED, FETCHED, AFTER, TRIED, DUE, QUEUED, QUEUED_AT, PENDING, BY_RELEASE, BY_PREFETCH = range(11)
# Per replay: its point, its entry in the store, the bytes of its targets.
REPLAY_POINT, ENTRY, REPLAY_BYTES = range(11, 14)
DUE_START, RELEASE_START, PREFETCH_START = range(3)
"""Rows of ``Scratch.starts``: where in ``DUE`` those of each save point begin, and in the other two those of a point."""
NEED_POINT, LATER_NEED = 0, 1
"""Columns of ``Scratch.nodes``."""
CURVE, MOVES, SEGMENT = range(3)
"""Rows of ``Scratch.curves``: bytes at each tick; what comes and goes there; the most from a use point to the next."""
REPLAY_COUNT, NODE_COUNT = range(2)
"""Of ``Scratch.counts``."""

NOW_S, STALL_S, INTERFERENCE_S, RUNTIME_S, LEFT_OUT_S, LEFT_IN_S, TAKEN_S, DONE_S = range(8)
"""Of ``Clock.seconds``; what is left of a copy counts alone on the link, ``TAKEN_S`` is the thread's at points."""
NOW_OUT, NOW_IN, HEAD_OUT, HEAD_IN, END_OUT, END_IN, THREAD_OP = range(7)
"""Of ``Clock.state``: the copy that runs in each queue (-1: none), the next one, and the end; the thread's op."""
IS_OUT, IS_IN, IS_ARRIVING, RELEASE_TICK, BACK_TICK, QUEUE_OUT, QUEUE_IN = range(7)
"""Columns of ``Clock.values``: whether its copies are done, or one back is under way; when it left and came back (-1). Of
the queues the value at each place."""
COMPUTED_S, BEHIND_S = range(2)
"""Columns of ``Clock.op_s``: work before the op, recording included where the thread computes; by how much a thread that
works ahead comes to the op later than a device would that never waits."""


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
        values=_zeros(values, 11),
        orders=_zeros(14, values),
        starts=_zeros(3, max(points, values) + 1),
        nodes=_zeros(values + inputs, 2),
        curves=_zeros(3, ticks + 1),
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
    return Clock(np.zeros(8), _zeros(7), _zeros(len(layout.values), 7), _zeros(rows), np.zeros((rows, 2)))


def _zeros(*shape: int) -> Ints:
    return np.zeros(shape, dtype=np.int64)
