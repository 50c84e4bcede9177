"""Seconds: one compute stream, two copy queues and the launching thread (``Streams``, ``Thread``)."""

from __future__ import annotations

from poochplan.planner.problem.arrays import Floats

from .codes import AHEAD, COMPUTING
from .compiled import part
from .layout import (
    BEFORE_S,
    DUPLEX,
    DURATION_S,
    INTERFERENCE_IN,
    INTERFERENCE_OUT,
    KIND,
    LAUNCH_S,
    RECORD_S,
    REPLAY_S,
    WORK_S,
    Layout,
)
from .scratch import (
    BEHIND_S,
    COMPUTED_S,
    DONE_S,
    END_OUT,
    HEAD_OUT,
    INTERFERENCE_S,
    IS_OUT,
    LATE_S,
    LAUNCHES_S,
    LEFT_IN_S,
    LEFT_OUT_S,
    NOW_IN,
    NOW_OUT,
    NOW_S,
    OPS_S,
    QUEUE_OUT,
    RUNS,
    RUNTIME_S,
    SOURCES,
    STALL_S,
    START,
    TAKEN_S,
    TARGETS,
    THREAD_OP,
    Clock,
    Store,
)

# -- streams ----------------------------------------------------------------------------------------------------------


@part
def queue_copy(copy_s: Floats, clock: Clock, value: int, queue: int) -> None:
    """Queues a copy ``OUT`` or ``IN``."""
    place = clock.state[END_OUT + queue]
    clock.values[place, QUEUE_OUT + queue] = value
    clock.state[END_OUT + queue] = place + 1
    if clock.state[NOW_OUT + queue] < 0:
        _start_next(copy_s, clock, queue)


@part
def _start_next(copy_s: Floats, clock: Clock, queue: int) -> None:
    state, head = clock.state, clock.state[HEAD_OUT + queue]
    state[NOW_OUT + queue] = -1
    if head < state[END_OUT + queue]:
        value = clock.values[head, QUEUE_OUT + queue]
        state[NOW_OUT + queue] = value
        clock.seconds[LEFT_OUT_S + queue] = copy_s[value, queue]
        state[HEAD_OUT + queue] = head + 1


@part
def wait_for(rates: Floats, copy_s: Floats, clock: Clock, value: int, queue: int) -> None:
    """The compute stream waits for a copy ``OUT`` or ``IN``."""
    while clock.values[value, IS_OUT + queue] == 0:
        clock.seconds[STALL_S] += _advance(rates, copy_s, clock, float("inf"))


@part
def compute(rates: Floats, copy_s: Floats, clock: Clock, work_s: float) -> None:
    """Runs seconds of ops, slowed by the copies beside them."""
    seconds, state = clock.seconds, clock.state
    while work_s > 0.0:
        slow = 1.0
        if state[NOW_OUT] >= 0:
            slow += rates[INTERFERENCE_OUT]
        if state[NOW_IN] >= 0:
            slow += rates[INTERFERENCE_IN]
        wall_s = _advance(rates, copy_s, clock, work_s * slow)
        done_s = min(work_s, wall_s / slow)
        seconds[INTERFERENCE_S] += wall_s - done_s
        work_s = 0.0 if wall_s >= work_s * slow else work_s - done_s


@part
def _advance(rates: Floats, copy_s: Floats, clock: Clock, limit_s: float) -> float:
    """Moves the clock by ``limit_s`` or to the next end of a copy, whichever is first; returns by how much."""
    seconds, state = clock.seconds, clock.state
    is_out, is_in = state[NOW_OUT] >= 0, state[NOW_IN] >= 0
    share, wall_s = 1.0, limit_s
    if is_out and is_in:
        share = rates[DUPLEX]
    if is_out:
        wall_s = min(wall_s, seconds[LEFT_OUT_S] / share)
    if is_in:
        wall_s = min(wall_s, seconds[LEFT_IN_S] / share)
    seconds[NOW_S] += wall_s
    for queue in range(2):
        if (is_out, is_in)[queue]:
            if seconds[LEFT_OUT_S + queue] / share <= wall_s:
                clock.values[state[NOW_OUT + queue], IS_OUT + queue] = 1
                _start_next(copy_s, clock, queue)
            else:
                seconds[LEFT_OUT_S + queue] -= wall_s * share
    return wall_s


@part
def _spend(rates: Floats, copy_s: Floats, clock: Clock, work_s: float) -> None:
    if clock.state[NOW_OUT] < 0 and clock.state[NOW_IN] < 0:
        clock.seconds[NOW_S] += work_s
    else:
        compute(rates, copy_s, clock, work_s)
    clock.seconds[RUNTIME_S] += work_s


@part
def _pass(rates: Floats, copy_s: Floats, clock: Clock, left_s: float) -> None:
    while left_s > 0.0:
        left_s -= _advance(rates, copy_s, clock, left_s)


@part
def _wait_until(rates: Floats, copy_s: Floats, clock: Clock, wall_s: float) -> None:
    if wall_s > clock.seconds[NOW_S]:
        idle_s = wall_s - clock.seconds[NOW_S]
        clock.seconds[RUNTIME_S] += idle_s
        _pass(rates, copy_s, clock, idle_s)


@part
def _is_undisturbed(rates: Floats, clock: Clock) -> bool:
    if rates[INTERFERENCE_OUT] > 0.0 or rates[INTERFERENCE_IN] > 0.0:
        return bool(clock.state[NOW_OUT] < 0 and clock.state[NOW_IN] < 0)
    return True


# -- the launching thread ---------------------------------------------------------------------------------------------


@part
def reach(layout: Layout, clock: Clock, op: int) -> None:
    """All that comes before op ``op``, and before the point in front of it, has been done."""
    seconds, state, rates, copy_s = clock.seconds, clock.state, layout.rates, layout.copy_s
    if layout.facts[KIND] != AHEAD:
        work_s = clock.op_s[op, COMPUTED_S]
        if work_s > seconds[DONE_S]:
            compute(rates, copy_s, clock, work_s - seconds[DONE_S])
            seconds[DONE_S] = work_s
    else:
        if op > state[THREAD_OP]:
            _run_on(layout, clock, state[THREAD_OP], op)
            state[THREAD_OP] = op
        _wait_until(rates, copy_s, clock, _thread_s(layout, clock))


@part
def finish(layout: Layout, clock: Clock) -> float:
    """The rest of the step; returns the seconds of recording."""
    op, kind = len(clock.op_s) - 1, layout.facts[KIND]
    if kind == AHEAD:
        reach(layout, clock, op)
        return 0.0
    compute(layout.rates, layout.copy_s, clock, clock.op_s[op, COMPUTED_S] - clock.seconds[DONE_S])
    return float(layout.rates[RECORD_S] * clock.recorded[op])


@part
def take(layout: Layout, clock: Clock, taken_s: float) -> None:
    """The runtime's own work at a point."""
    if layout.facts[KIND] == COMPUTING:
        _spend(layout.rates, layout.copy_s, clock, taken_s)
    elif layout.facts[KIND] == AHEAD:
        clock.seconds[TAKEN_S] += taken_s
        _wait_until(layout.rates, layout.copy_s, clock, _thread_s(layout, clock))


@part
def run_replay(layout: Layout, clock: Clock, store: Store, entry: int) -> None:
    """Runs the ops of a merged replay."""
    rates, copy_s, kind = layout.rates, layout.copy_s, layout.facts[KIND]
    if kind == AHEAD:
        _replay_ahead(layout, clock, store, entry)
        clock.seconds[TAKEN_S] += store.entry_s[entry, LAUNCHES_S]
        return
    compute(rates, copy_s, clock, store.entry_s[entry, OPS_S])
    if kind == COMPUTING:
        _spend(rates, copy_s, clock, rates[REPLAY_S] * store.entries[entry, RUNS])


@part
def _replay_ahead(layout: Layout, clock: Clock, store: Store, entry: int) -> None:
    rates, copy_s, ops_s = layout.rates, layout.copy_s, store.entry_s[entry, OPS_S]
    start_s = _thread_s(layout, clock)
    idle_s = start_s + store.entry_s[entry, LATE_S] - clock.seconds[NOW_S]
    if idle_s <= 0.0:
        compute(rates, copy_s, clock, ops_s)
    elif _is_undisturbed(rates, clock):
        clock.seconds[RUNTIME_S] += idle_s
        _pass(rates, copy_s, clock, ops_s + idle_s)
    else:
        begin = store.entries[entry, START] + store.entries[entry, TARGETS] + store.entries[entry, SOURCES]
        for k in range(begin, begin + store.entries[entry, RUNS]):
            op = store.pool[k]
            start_s += rates[REPLAY_S]
            _wait_until(rates, copy_s, clock, start_s)
            compute(rates, copy_s, clock, layout.op_s[op, DURATION_S])
            start_s += layout.op_s[op, LAUNCH_S]


@part
def _thread_s(layout: Layout, clock: Clock) -> float:
    op = clock.state[THREAD_OP]
    at_op_s = layout.op_s[op, BEFORE_S] + layout.rates[RECORD_S] * clock.recorded[op]
    return float(at_op_s + clock.seconds[TAKEN_S])


@part
def _run_on(layout: Layout, clock: Clock, begin: int, end: int) -> None:
    """From op to op of a thread that works ahead: together where none waits for its launch, else one by one."""
    rates, copy_s, op_s, seconds = layout.rates, layout.copy_s, layout.op_s, clock.seconds
    late_s = seconds[TAKEN_S] + _most_behind(clock.op_s, begin, end) + op_s[begin, WORK_S]
    if late_s <= seconds[NOW_S]:
        compute(rates, copy_s, clock, op_s[end, WORK_S] - op_s[begin, WORK_S])
        return
    for op in range(begin, end):
        if _is_undisturbed(rates, clock):
            late_s = seconds[TAKEN_S] + _most_behind(clock.op_s, op, end) + op_s[op, WORK_S]
            idle_s = max(0.0, late_s - seconds[NOW_S])
            seconds[RUNTIME_S] += idle_s
            _pass(rates, copy_s, clock, op_s[end, WORK_S] - op_s[op, WORK_S] + idle_s)
            return
        _wait_until(rates, copy_s, clock, seconds[TAKEN_S] + (clock.op_s[op, BEHIND_S] + op_s[op, WORK_S]))
        compute(rates, copy_s, clock, op_s[op, DURATION_S])


@part
def _most_behind(op_s: Floats, begin: int, end: int) -> float:
    most_s = op_s[begin, BEHIND_S]
    for op in range(begin + 1, end):
        most_s = max(most_s, op_s[op, BEHIND_S])
    return float(most_s)
