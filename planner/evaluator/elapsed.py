"""Seconds: one compute stream, two copy queues and the launching thread (``Streams``, ``Thread``)."""

from __future__ import annotations

from poochplan.planner.problem.arrays import Bytes, Flags, Floats, Ints

from .codes import AHEAD, COMPUTING, RECOMPUTE
from .compiled import compiled
from .layout import Layout, Rates, Values
from .scratch import (
    DONE_S,
    IN_END,
    IN_HEAD,
    IN_LEFT_S,
    IN_NOW,
    INTERFERENCE_S,
    NOW_S,
    OUT_END,
    OUT_HEAD,
    OUT_LEFT_S,
    OUT_NOW,
    RUNTIME_S,
    STALL_S,
    TAKEN_S,
    THREAD_OP,
    Clock,
    Store,
)

MERGE_GAP_OPS = 4
"""``recording.MERGE_GAP_OPS``."""


@compiled
def start_clock(layout: Layout, decisions: Bytes, clock: Clock) -> None:
    """Puts the clock to the begin of a step in which the thread records what ``decisions`` ask for."""
    rates, work_s = layout.rates, layout.work_before_op_s
    clock.seconds[:] = 0.0
    clock.state[:] = 0
    clock.state[OUT_NOW] = -1
    clock.state[IN_NOW] = -1
    clock.is_out[:] = False
    clock.is_in[:] = False
    clock.is_arriving[:] = False
    clock.release_tick[:] = -1
    clock.back_tick[:] = -1
    if len(rates.recorded):
        _record(rates, decisions, clock.recorded)
    recorded = clock.recorded
    for op in range(len(work_s)):
        clock.work_s[op] = work_s[op]
        if rates.kind == COMPUTING:
            clock.work_s[op] += rates.record_s * recorded[op]
    if rates.kind == AHEAD:
        for op in range(len(work_s) - 1):
            at_op_s = rates.before_op_s[op] + rates.record_s * recorded[op]
            clock.behind_s[op] = at_op_s + rates.record_s * (recorded[op + 1] - recorded[op]) - work_s[op]


@compiled
def _record(rates: Rates, decisions: Bytes, recorded: Ints) -> None:
    """Ops recorded before each op, and in all (``recording_of``, ``recorded_before``)."""
    recorded[:] = 0
    for value in range(len(decisions)):
        if decisions[value] == RECOMPUTE:
            for k in range(rates.recorded_start[value], rates.recorded_start[value + 1]):
                recorded[rates.recorded[k]] = 1
    saves, begin, end = len(rates.save_op), -2, -1  # no window yet
    count = len(recorded) - 1
    for op in range(count):
        if recorded[op]:
            recorded[op] = 0
            on = rates.on[op]
            if begin == -2:
                begin = on
            elif on >= 0 and end < saves and rates.save_op[on] - rates.save_op[end] >= MERGE_GAP_OPS:
                _switch(rates, recorded, begin, end)
                begin = on
            end = rates.off[op]
    if begin > -2:
        _switch(rates, recorded, begin, end)
    done = 0
    for op in range(count + 1):
        is_recorded = recorded[op] < 0
        recorded[op] = done
        done += is_recorded


@compiled
def _switch(rates: Rates, recorded: Ints, begin: int, end: int) -> None:
    """Marks (-1) the ops between two save points, or the step's begin and recording's end."""
    first = rates.save_op[begin] if begin >= 0 else 0
    last = rates.save_op[end] if end < len(rates.save_op) else rates.last_save_op
    for op in range(first, last):
        recorded[op] = -1


# -- streams ----------------------------------------------------------------------------------------------------------


@compiled
def queue_copy(values: Values, clock: Clock, value: int, is_out: bool) -> None:
    """Queues a copy."""
    if is_out:
        clock.out_queue[clock.state[OUT_END]] = value
        clock.state[OUT_END] += 1
        if clock.state[OUT_NOW] < 0:
            _start_next(values.out_s, clock, clock.out_queue, OUT_NOW, OUT_HEAD, OUT_END, OUT_LEFT_S)
    else:
        clock.in_queue[clock.state[IN_END]] = value
        clock.state[IN_END] += 1
        if clock.state[IN_NOW] < 0:
            _start_next(values.in_s, clock, clock.in_queue, IN_NOW, IN_HEAD, IN_END, IN_LEFT_S)


@compiled
def _start_next(copy_s: Floats, clock: Clock, queue: Ints, now: int, head: int, end: int, left_s: int) -> None:
    state = clock.state
    state[now] = -1
    if state[head] < state[end]:
        state[now] = queue[state[head]]
        clock.seconds[left_s] = copy_s[state[now]]
        state[head] += 1


@compiled
def wait_for(layout: Layout, clock: Clock, done: Flags, value: int) -> None:
    """The compute stream waits for a copy."""
    while not done[value]:
        clock.seconds[STALL_S] += _advance(layout, clock, float("inf"))


@compiled
def compute(layout: Layout, clock: Clock, work_s: float) -> None:
    """Runs seconds of ops, slowed by the copies beside them."""
    rates, seconds, state = layout.rates, clock.seconds, clock.state
    while work_s > 0.0:
        slow = 1.0
        if state[OUT_NOW] >= 0:
            slow += rates.interference_out
        if state[IN_NOW] >= 0:
            slow += rates.interference_in
        wall_s = _advance(layout, clock, work_s * slow)
        done_s = min(work_s, wall_s / slow)
        seconds[INTERFERENCE_S] += wall_s - done_s
        work_s = 0.0 if wall_s >= work_s * slow else work_s - done_s


@compiled
def _advance(layout: Layout, clock: Clock, limit_s: float) -> float:
    """Moves the clock by ``limit_s`` or to the next end of a copy, whichever is first; returns by how much."""
    seconds, state, values = clock.seconds, clock.state, layout.values
    is_out, is_in = state[OUT_NOW] >= 0, state[IN_NOW] >= 0
    share, wall_s = 1.0, limit_s
    if is_out and is_in:
        share = layout.rates.duplex
    if is_out:
        wall_s = min(wall_s, seconds[OUT_LEFT_S] / share)
    if is_in:
        wall_s = min(wall_s, seconds[IN_LEFT_S] / share)
    seconds[NOW_S] += wall_s
    if is_out:
        if seconds[OUT_LEFT_S] / share <= wall_s:
            clock.is_out[state[OUT_NOW]] = True
            _start_next(values.out_s, clock, clock.out_queue, OUT_NOW, OUT_HEAD, OUT_END, OUT_LEFT_S)
        else:
            seconds[OUT_LEFT_S] -= wall_s * share
    if is_in:
        if seconds[IN_LEFT_S] / share <= wall_s:
            clock.is_in[state[IN_NOW]] = True
            _start_next(values.in_s, clock, clock.in_queue, IN_NOW, IN_HEAD, IN_END, IN_LEFT_S)
        else:
            seconds[IN_LEFT_S] -= wall_s * share
    return wall_s


@compiled
def _spend(layout: Layout, clock: Clock, work_s: float) -> None:
    if clock.state[OUT_NOW] < 0 and clock.state[IN_NOW] < 0:
        clock.seconds[NOW_S] += work_s
    else:
        compute(layout, clock, work_s)
    clock.seconds[RUNTIME_S] += work_s


@compiled
def _pass(layout: Layout, clock: Clock, left_s: float) -> None:
    while left_s > 0.0:
        left_s -= _advance(layout, clock, left_s)


@compiled
def _wait_until(layout: Layout, clock: Clock, wall_s: float) -> None:
    idle_s = wall_s - clock.seconds[NOW_S]
    if wall_s > clock.seconds[NOW_S]:
        clock.seconds[RUNTIME_S] += idle_s
        _pass(layout, clock, idle_s)


@compiled
def _is_undisturbed(rates: Rates, clock: Clock) -> bool:
    if rates.interference_out > 0.0 or rates.interference_in > 0.0:
        return bool(clock.state[OUT_NOW] < 0 and clock.state[IN_NOW] < 0)
    return True


# -- the launching thread ---------------------------------------------------------------------------------------------


@compiled
def reach(layout: Layout, clock: Clock, op: int) -> None:
    """All that comes before op ``op``, and before the point in front of it, has been done."""
    seconds, state = clock.seconds, clock.state
    if layout.rates.kind != AHEAD:
        work_s = clock.work_s[op]
        if work_s > seconds[DONE_S]:
            compute(layout, clock, work_s - seconds[DONE_S])
            seconds[DONE_S] = work_s
        return
    if op > state[THREAD_OP]:
        _run_on(layout, clock, state[THREAD_OP], op)
        state[THREAD_OP] = op
    _wait_until(layout, clock, _thread_s(layout.rates, clock))


@compiled
def finish(layout: Layout, clock: Clock) -> float:
    """The rest of the step; returns its seconds, without those of replays."""
    op = len(clock.work_s) - 1
    seconds, recording_s = clock.seconds, 0.0
    if layout.rates.kind == AHEAD:
        reach(layout, clock, op)
    else:
        compute(layout, clock, clock.work_s[op] - seconds[DONE_S])
    if layout.rates.kind == COMPUTING:
        recording_s = layout.rates.record_s * clock.recorded[op]
    return recording_s


@compiled
def take(layout: Layout, clock: Clock, taken_s: float) -> None:
    """The runtime's own work at a point."""
    if layout.rates.kind == COMPUTING:
        _spend(layout, clock, taken_s)
    elif layout.rates.kind == AHEAD:
        clock.seconds[TAKEN_S] += taken_s
        _wait_until(layout, clock, _thread_s(layout.rates, clock))


@compiled
def run_replay(layout: Layout, clock: Clock, store: Store, entry: int) -> None:
    """Runs the ops of a merged replay."""
    rates, seconds_s = layout.rates, store.seconds[entry]
    if rates.kind == AHEAD:
        _replay_ahead(layout, clock, store, entry)
        clock.seconds[TAKEN_S] += store.launch_s[entry]
        return
    compute(layout, clock, seconds_s)
    if rates.kind == COMPUTING:
        _spend(layout, clock, rates.replay_s * store.ops[entry])


@compiled
def _replay_ahead(layout: Layout, clock: Clock, store: Store, entry: int) -> None:
    rates = layout.rates
    start_s = _thread_s(rates, clock)
    idle_s = start_s + store.behind_s[entry] - clock.seconds[NOW_S]
    if idle_s <= 0.0:
        compute(layout, clock, store.seconds[entry])
    elif _is_undisturbed(rates, clock):
        clock.seconds[RUNTIME_S] += idle_s
        _pass(layout, clock, store.seconds[entry] + idle_s)
    else:
        begin = store.start[entry] + store.targets[entry] + store.inputs[entry]
        for op in store.pool[begin : begin + store.ops[entry]]:
            start_s += rates.replay_s
            _wait_until(layout, clock, start_s)
            compute(layout, clock, layout.replays.op_s[op])
            start_s += rates.launch_s[op]


@compiled
def _thread_s(rates: Rates, clock: Clock) -> float:
    op = clock.state[THREAD_OP]
    now_s: float = rates.before_op_s[op] + rates.record_s * clock.recorded[op] + clock.seconds[TAKEN_S]
    return now_s


@compiled
def _run_on(layout: Layout, clock: Clock, begin: int, end: int) -> None:
    """From op to op of a thread that works ahead: together where none waits for its launch, else one by one."""
    work_s, behind_s, seconds = clock.work_s, clock.behind_s, clock.seconds
    most_s = behind_s[begin:end].max()
    if seconds[TAKEN_S] + most_s + work_s[begin] <= seconds[NOW_S]:
        compute(layout, clock, work_s[end] - work_s[begin])
        return
    for op in range(begin, end):
        if _is_undisturbed(layout.rates, clock):
            idle_s = seconds[TAKEN_S] + behind_s[op:end].max() + work_s[op] - seconds[NOW_S]
            seconds[RUNTIME_S] += max(0.0, idle_s)
            _pass(layout, clock, work_s[end] - work_s[op] + max(0.0, idle_s))
            return
        _wait_until(layout, clock, seconds[TAKEN_S] + (behind_s[op] + work_s[op]))
        compute(layout, clock, layout.replays.op_s[op])
