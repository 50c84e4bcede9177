"""What decisions give: seconds of the step, peak bytes and bytes moved, as ``try_style`` says, to the bit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from poochplan.formats.plan import Decision
from poochplan.planner.problem.arrays import Bytes, Ints
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.style import Style

from .codes import EARLY, KEEP, ON_DEMAND, RECOMPUTE, STYLE_OF, SWAP, codes_of, decisions_of, style_code
from .compiled import compiled, one_at_a_time, part
from .copies import prefetch, queue_out, sort_by
from .elapsed import finish, queue_copy, reach, run_replay, take, wait_for
from .layout import (
    BASE,
    BORN,
    DEATH,
    FETCH_S,
    FIRST_USE_OF,
    IN,
    LESS,
    MOVED,
    OP,
    OUT,
    OUT_S,
    SIZE,
    STEP_S,
    TICK,
    Layout,
    layout_of,
)
from .merged import find_needs
from .residency import lay_curve, put, release_early, release_late
from .scratch import (
    BACK_TICK,
    BY_PREFETCH,
    BY_RELEASE,
    END,
    ENTRY,
    FETCHED,
    INTERFERENCE_S,
    IS_ARRIVING,
    MOVES,
    OPS_S,
    PEAK,
    PREFETCH,
    PREFETCH_START,
    QUEUED,
    QUEUED_AT,
    RELEASE,
    RELEASE_START,
    RELEASE_TICK,
    RELEASED,
    REPLAY_BYTES,
    REPLAY_COUNT,
    REPLAY_POINT,
    REPLAYED_AT,
    REPLAYED_S,
    RUNTIME_S,
    SOURCES,
    STALL_S,
    START,
    TARGETS,
    WANTED,
    Scratch,
    scratch_for,
    start_clock,
)


class Evaluation(NamedTuple):
    """What decisions give in one style."""

    step_s: float
    peak_bytes: int
    moved_bytes: int
    replay_s: float
    """Of the step, what replays take."""


class Evaluator:
    """Evaluations of one problem, for one thread."""

    def __init__(self, problem: Problem) -> None:
        self.layout = layout_of(problem)
        self.scratch = scratch_for(self.layout)

    def evaluate(self, wish: Sequence[Decision], budget_bytes: int, style: Style) -> Evaluation:
        """What ``try_style`` gives for the same."""
        found = evaluate(self.layout, self.scratch, budget_bytes, style_code(style), codes_of(wish))
        return Evaluation(*found, float(self.scratch.clock.seconds[REPLAYED_S]))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """As they turned out in the last evaluation: a swap that memory never asked to release is kept."""
        return decisions_of(self.scratch.decisions)

    def memory_bytes(self, wish: Sequence[Decision], budget_bytes: int, style: Style) -> Ints:
        """Most bytes live at each tick, (ticks,): what ``try_style`` gives for the same."""
        self.evaluate(wish, budget_bytes, style)
        memory: Ints = self.scratch.curves[MOVES, : len(self.layout.ticks)].copy()
        return memory


def warm_up(problem: Problem) -> float:
    """Compiles the evaluator, or loads it, where that was not done yet; returns the seconds it took."""
    began_s = time.perf_counter()
    evaluator = Evaluator(problem)
    with one_at_a_time():
        evaluator.evaluate([Decision.KEEP] * problem.value_count, 0, STYLE_OF[0])
    return time.perf_counter() - began_s


@compiled
def evaluate(
    layout: Layout, scratch: Scratch, budget_bytes: int, style: int, decisions: Bytes
) -> tuple[float, int, int]:
    """(seconds of the step, peak bytes, bytes moved) of ``decisions``, scheduled in a style within a budget.

    ``scratch.decisions`` are then the final ones: a swap that memory never asked to release is kept.
    """
    for value in range(len(decisions)):
        scratch.decisions[value] = decisions[value]
    find_needs(layout, decisions, scratch)
    lay_curve(layout, decisions, scratch)
    queued = _schedule(layout, scratch, budget_bytes, style)
    start_clock(layout, decisions, scratch.clock)
    step_s, moved_bytes = _walk(layout, scratch, queued)
    return step_s, _peak_bytes(layout, scratch), moved_bytes


@part
def _schedule(layout: Layout, scratch: Scratch, budget_bytes: int, style: int) -> int:
    """Chooses the points of releases and copies; returns how many values leave."""
    here, orders, starts, decisions = scratch.values, scratch.orders, scratch.starts, scratch.decisions
    points = len(layout.points)
    if style in (EARLY, ON_DEMAND):
        released = release_early(layout, decisions, scratch)
    else:
        for value in range(len(here)):
            here[value, WANTED] = decisions[value] == SWAP
        waiting = queue_out(layout, scratch, False)
        released = release_late(layout, scratch, budget_bytes, waiting)
    for value in range(len(here)):
        here[value, WANTED] = here[value, RELEASE] >= 0
        if decisions[value] == SWAP and here[value, RELEASE] < 0:
            decisions[value] = KEEP
    fetched = prefetch(layout, scratch, budget_bytes, style)
    sort_by(here, PREFETCH, orders[FETCHED], fetched, points, starts[PREFETCH_START], orders[BY_PREFETCH])
    sort_by(here, RELEASE, orders[RELEASED], released, points, starts[RELEASE_START], orders[BY_RELEASE])
    return queue_out(layout, scratch, True)


@part
def _walk(layout: Layout, scratch: Scratch, queued: int) -> tuple[float, int]:
    """Goes once through the points as the runtime does: seconds of the step, and bytes moved."""
    points, rates, copy_s, values = layout.points, layout.rates, layout.copy_s, layout.values
    orders, starts, clock, entry_s = scratch.orders, scratch.starts, scratch.clock, scratch.store.entry_s
    replay_s, moved_bytes, out, run, runs = 0.0, 0, 0, 0, scratch.counts[REPLAY_COUNT]
    for point in range(len(points)):
        op = points[point, OP]
        while out < queued and orders[QUEUED_AT, out] == point:
            reach(layout, clock, op)
            take(layout, clock, rates[OUT_S])
            queue_copy(copy_s, clock, orders[QUEUED, out], OUT)
            moved_bytes += values[orders[QUEUED, out], MOVED]
            out += 1
        for k in range(starts[RELEASE_START, point], starts[RELEASE_START, point + 1]):
            reach(layout, clock, op)
            wait_for(rates, copy_s, clock, orders[BY_RELEASE, k], OUT)
            clock.values[orders[BY_RELEASE, k], RELEASE_TICK] = points[point, TICK]
        for k in range(starts[PREFETCH_START, point], starts[PREFETCH_START, point + 1]):
            moved_bytes += _fetch(layout, scratch, point, orders[BY_PREFETCH, k])
        if run < runs and orders[REPLAY_POINT, run] == point:
            moved_bytes += _replay(layout, scratch, point, orders[ENTRY, run])
            replay_s += entry_s[orders[ENTRY, run], OPS_S]
            run += 1
        used = points[point, FIRST_USE_OF]
        if used >= 0 and scratch.decisions[used] == SWAP:
            moved_bytes += _fetch(layout, scratch, point, used)
            _wait_in(layout, scratch, point, used)
    added_s = finish(layout, clock)
    seconds = clock.seconds
    added_s = seconds[RUNTIME_S] + added_s
    seconds[REPLAYED_S] = replay_s
    return rates[STEP_S] + replay_s + seconds[STALL_S] + seconds[INTERFERENCE_S] + added_s, moved_bytes


@part
def _fetch(layout: Layout, scratch: Scratch, point: int, value: int) -> int:
    """Queues the copy back of a value that is away; returns its bytes."""
    clock = scratch.clock
    if clock.values[value, RELEASE_TICK] < 0 or clock.values[value, BACK_TICK] >= 0:
        return 0
    reach(layout, clock, layout.points[point, OP])
    take(layout, clock, layout.rates[FETCH_S])
    queue_copy(layout.copy_s, clock, value, IN)
    clock.values[value, BACK_TICK] = layout.points[point, TICK]
    clock.values[value, IS_ARRIVING] = 1
    return int(layout.values[value, MOVED])


@part
def _wait_in(layout: Layout, scratch: Scratch, point: int, value: int) -> None:
    clock = scratch.clock
    if clock.values[value, IS_ARRIVING]:
        clock.values[value, IS_ARRIVING] = 0
        reach(layout, clock, layout.points[point, OP])
        wait_for(layout.rates, layout.copy_s, clock, value, IN)


@part
def _replay(layout: Layout, scratch: Scratch, point: int, entry: int) -> int:
    """Brings back what a replay starts from, and runs it; returns the bytes of copies."""
    store, moved_bytes = scratch.store, 0
    begin = store.entries[entry, START] + store.entries[entry, TARGETS]
    for k in range(begin, begin + store.entries[entry, SOURCES]):
        moved_bytes += _fetch(layout, scratch, point, store.pool[k])
        _wait_in(layout, scratch, point, store.pool[k])
    reach(layout, scratch.clock, layout.points[point, OP])
    run_replay(layout, scratch.clock, store, entry)
    return moved_bytes


@part
def _peak_bytes(layout: Layout, scratch: Scratch) -> int:
    """Most bytes live at any tick, of this step or of the first one (``lives``, ``_add_inside_replays``).

    ``scratch.curves[MOVES]`` then holds the bytes at each tick.
    """
    values, points, here, orders, moves = (
        layout.values,
        layout.points,
        scratch.values,
        scratch.orders,
        scratch.curves[MOVES],
    )
    ticks, entries = len(layout.ticks), scratch.store.entries
    moves.fill(0)
    for value in range(len(values)):
        death, end = values[value, DEATH], here[value, END]
        release, back = scratch.clock.values[value, RELEASE_TICK], scratch.clock.values[value, BACK_TICK]
        until = max(death, end)
        if scratch.decisions[value] == RECOMPUTE:
            until, replayed_at = death, here[value, REPLAYED_AT]
            back = points[replayed_at, TICK] if replayed_at >= 0 else -1
        elif release >= 0:
            until = max(death, release - 1)
        put(moves, ticks, values[value, BORN], min(until, ticks - 1), values[value, SIZE])
        if back >= 0:
            put(moves, ticks, back, min(max(end, back), ticks - 1), values[value, SIZE])
    live, most, run, runs = 0, 0, 0, scratch.counts[REPLAY_COUNT]
    for tick in range(ticks):
        live += moves[tick]
        now = live + layout.ticks[tick, BASE]
        if run < runs and points[orders[REPLAY_POINT, run], TICK] == tick:
            now = max(now, now - orders[REPLAY_BYTES, run] + entries[orders[ENTRY, run], PEAK])
            run += 1
        most = max(most, now, now - layout.ticks[tick, LESS])
        moves[tick] = now
    return most
