"""What an evaluation writes to: work arrays, made once per thread, and the replays that were merged so far."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from poochplan.planner.problem.arrays import Bytes, Flags, Floats, Ints

from .codes import AHEAD
from .layout import Layout

SLOTS: Final = 1 << 16
"""Of the table of merged replays, which holds half as many before it is cleared."""
POOLED: Final = 1 << 20
"""Targets, inputs and ops that it holds before it is cleared, for a small problem."""

ENTRIES, POOL_END, MARK = 0, 1, 2
"""Of ``Store.counts``: replays in the store, what its pool holds, and the last mark given."""
REPLAYS, NODES = 0, 1
"""Of ``Needed.counts``."""
NOW_S, STALL_S, INTERFERENCE_S, RUNTIME_S, OUT_LEFT_S, IN_LEFT_S, TAKEN_S, DONE_S = range(8)
"""Of ``Clock.seconds``; what is left of a copy counts alone on the link, ``TAKEN_S`` is the thread's at points."""
OUT_NOW, OUT_HEAD, OUT_END, IN_NOW, IN_HEAD, IN_END, THREAD_OP = range(7)
"""Of ``Clock.state``: for each queue the copy that runs (-1: none), the next one and the end; the thread's op."""


class Store(NamedTuple):
    """Merged replays by their sets of targets; open addressing, cleared when full."""

    counts: Ints
    slots: Ints
    """Entry + 1; 0 for none."""
    key: Ints
    start: Ints
    """Per entry: where the pool has its targets, behind them its inputs, behind these its ops."""
    targets: Ints
    """How many."""
    inputs: Ints
    ops: Ints
    seconds: Floats
    peak_bytes: Ints
    launch_s: Floats
    behind_s: Floats
    pool: Ints
    marks: Ints
    """Per saved value, then per value of the profile, per op: the last mark it was given."""
    chosen: Ints
    """Ops of the replay that is being merged."""
    last: Ints
    """Per value of the profile: position of the last op that touches it."""
    change: Ints
    least_room: int
    """What one evaluation can add to the pool."""


class Needed(NamedTuple):
    """What decisions need back (``Needs``)."""

    counts: Ints
    back_point: Ints
    claim: Ints
    """Last tick at which a replay needs the value; -1 when none does."""
    end: Ints
    """Last tick at which anything does."""
    first: Ints
    """Per value: the first point that needs it, as a node; -1 when none does."""
    final: Ints
    """Per such value: the last one."""
    next_need: Ints
    """Per value: the first one that the releases have not passed."""
    node_point: Ints
    node_next: Ints
    replay_point: Ints
    entry: Ints
    """Per replay: its entry in the store."""
    bytes: Ints
    """Per replay: bytes of its targets."""
    targets: Ints


class Chosen(NamedTuple):
    """The points chosen so far (``Fitting``)."""

    curve: Ints
    change: Ints
    release: Ints
    """Per value: its point; -1 for none."""
    back: Ints
    """Per released value: the point that needs it next; -1 when none does."""
    prefetch: Ints
    released: Ints
    """In the order of their releases."""
    fetched: Ints
    """In the order of need."""
    segment: Ints
    """Per use point: most bytes from there to the next."""
    next: Ints
    """Per place in the queue: the next place that may still help."""
    tried: Ints
    wanted: Flags
    pending: Flags
    due_start: Ints
    due: Ints
    queued: Ints
    queued_at: Ints
    release_start: Ints
    by_release: Ints
    prefetch_start: Ints
    by_prefetch: Ints
    place: Ints


class Clock(NamedTuple):
    """The compute stream, both queues and the launching thread."""

    seconds: Floats
    state: Ints
    out_queue: Ints
    in_queue: Ints
    is_out: Flags
    """Whether the value's copy out is done."""
    is_in: Flags
    is_arriving: Flags
    release_tick: Ints
    back_tick: Ints
    recorded: Ints
    """Per op and behind the last: ops recorded before it."""
    work_s: Floats
    """Per op and behind the last: seconds of the compute stream before it, recording included where it counts there."""
    behind_s: Floats
    """Per op: by how much a thread that works ahead comes to it later than a device would that never waits."""


class Scratch(NamedTuple):
    """All of it; for one thread at a time, and one layout."""

    decisions: Bytes
    """After an evaluation: the final decisions, where swaps that memory never asked to release are kept."""
    store: Store
    needed: Needed
    chosen: Chosen
    clock: Clock


def scratch_for(layout: Layout) -> Scratch:
    """New work arrays for evaluations of ``layout``."""
    values = layout.value_count
    return Scratch(np.zeros(values, dtype=np.int8), _store(layout), _needed(layout), _chosen(layout), _clock(layout))


def _store(layout: Layout) -> Store:
    replays = layout.replays
    ops, values = len(replays.op_s), len(replays.value_bytes)
    kept_ops = len(replays.ops) if layout.rates.kind == AHEAD else 0
    least_room = layout.value_count + len(replays.inputs) + kept_ops
    slots = SLOTS
    while slots < 4 * layout.value_count:
        slots *= 2
    entries = slots // 2
    return Store(
        counts=_zeros(3),
        slots=_zeros(slots),
        key=_room(entries),
        start=_room(entries),
        targets=_room(entries),
        inputs=_room(entries),
        ops=_room(entries),
        seconds=np.empty(entries),
        peak_bytes=_room(entries),
        launch_s=np.empty(entries),
        behind_s=np.empty(entries),
        pool=_room(max(POOLED, 4 * least_room)),
        marks=_zeros(layout.value_count + values + ops),
        chosen=_zeros(ops + 1),
        last=_zeros(values + 1),
        change=_zeros(ops + 2),
        least_room=least_room,
    )


def _needed(layout: Layout) -> Needed:
    values = layout.value_count
    nodes = values + len(layout.replays.inputs)
    return Needed(
        counts=_zeros(2),
        back_point=_zeros(values),
        claim=_zeros(values),
        end=_zeros(values),
        first=_zeros(values),
        final=_zeros(values),
        next_need=_zeros(values),
        node_point=_zeros(nodes),
        node_next=_zeros(nodes),
        replay_point=_zeros(values),
        entry=_zeros(values),
        bytes=_zeros(values),
        targets=_zeros(values),
    )


def _chosen(layout: Layout) -> Chosen:
    values, points, ticks = layout.value_count, len(layout.points.tick), layout.tick_count
    return Chosen(
        curve=_zeros(ticks),
        change=_zeros(ticks + 1),
        release=_zeros(values),
        back=_zeros(values),
        prefetch=_zeros(values),
        released=_zeros(values),
        fetched=_zeros(values),
        segment=_zeros(len(layout.uses.tick) + 1),
        next=_zeros(values),
        tried=_zeros(values),
        wanted=np.zeros(values, dtype=np.bool_),
        pending=np.zeros(values, dtype=np.bool_),
        due_start=_zeros(values + 1),
        due=_zeros(values),
        queued=_zeros(values),
        queued_at=_zeros(values),
        release_start=_zeros(points + 1),
        by_release=_zeros(values),
        prefetch_start=_zeros(points + 1),
        by_prefetch=_zeros(values),
        place=_zeros(values),
    )


def _clock(layout: Layout) -> Clock:
    values, ops = layout.value_count, len(layout.replays.op_s)
    return Clock(
        seconds=np.zeros(8),
        state=_zeros(7),
        out_queue=_zeros(values),
        in_queue=_zeros(values),
        is_out=np.zeros(values, dtype=np.bool_),
        is_in=np.zeros(values, dtype=np.bool_),
        is_arriving=np.zeros(values, dtype=np.bool_),
        release_tick=_zeros(values),
        back_tick=_zeros(values),
        recorded=_zeros(ops + 1),
        work_s=np.zeros(ops + 1),
        behind_s=np.zeros(ops),
    )


def _zeros(count: int) -> Ints:
    return np.zeros(count, dtype=np.int64)


def _room(count: int) -> Ints:
    return np.empty(count, dtype=np.int64)
