"""What decisions give: seconds of the step, peak bytes and bytes moved, as ``try_style`` says, to the bit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from poochplan.formats.plan import Decision
from poochplan.planner.problem.arrays import Bytes, Ints
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.style import Style

from .codes import EARLY, KEEP, ON_DEMAND, RECOMPUTE, STYLE_OF, SWAP, codes_of, style_code
from .compiled import compiled
from .copies import queue_out, sort_by, want
from .elapsed import finish, queue_copy, reach, run_replay, start_clock, take, wait_for
from .layout import Layout, layout_of
from .merged import find_needs
from .residency import lay_curve, prefetch, put, release_early, release_late
from .scratch import (
    INTERFERENCE_S,
    REPLAYS,
    RUNTIME_S,
    STALL_S,
    Scratch,
    scratch_for,
)


class Evaluation(NamedTuple):
    """What decisions give in one style."""

    step_s: float
    peak_bytes: int
    moved_bytes: int


class Evaluator:
    """Evaluations of one problem, for one thread."""

    def __init__(self, problem: Problem) -> None:
        self.layout = layout_of(problem)
        self.scratch = scratch_for(self.layout)

    def evaluate(self, wish: Sequence[Decision], budget_bytes: int, style: Style) -> Evaluation:
        """What ``try_style`` gives for the same."""
        return Evaluation(*evaluate(self.layout, self.scratch, budget_bytes, style_code(style), codes_of(wish)))


def warm_up(problem: Problem) -> float:
    """Compiles the evaluator, or loads it, where that was not done yet; returns the seconds it took."""
    began_s = time.perf_counter()
    evaluator = Evaluator(problem)
    evaluator.evaluate([Decision.KEEP] * problem.value_count, 0, STYLE_OF[0])
    return time.perf_counter() - began_s


@compiled
def evaluate(
    layout: Layout, scratch: Scratch, budget_bytes: int, style: int, decisions: Bytes
) -> tuple[float, int, int]:
    """(seconds of the step, peak bytes, bytes moved) of ``decisions``, scheduled in a style within a budget.

    ``scratch.decisions`` are then the final ones: a swap that memory never asked to release is kept.
    """
    scratch.decisions[:] = decisions
    find_needs(layout, decisions, scratch.needed, scratch.store)
    lay_curve(layout, decisions, scratch.needed, scratch.store, scratch.chosen)
    _schedule(layout, scratch, budget_bytes, style)
    step_s, moved_bytes = _walk(layout, scratch)
    return step_s, _peak_bytes(layout, scratch), moved_bytes


@compiled
def _schedule(layout: Layout, scratch: Scratch, budget_bytes: int, style: int) -> None:
    """Chooses the points of releases and copies."""
    points, values, chosen, decisions = layout.points, layout.values, scratch.chosen, scratch.decisions
    chosen.release[:] = -1
    if style in (EARLY, ON_DEMAND):
        released = release_early(layout, decisions, scratch.needed, chosen)
    else:
        for value in range(layout.value_count):
            chosen.wanted[value] = decisions[value] == SWAP
        waiting = queue_out(points, values, chosen, False)
        released = release_late(layout, budget_bytes, scratch.needed, chosen, waiting)
    for value in range(layout.value_count):
        if decisions[value] == SWAP and chosen.release[value] < 0:
            decisions[value] = KEEP
    fetched = prefetch(points, values, layout.uses, chosen, released, budget_bytes, style)
    sort_by(chosen.prefetch, chosen.fetched, fetched, chosen.prefetch_start, chosen.by_prefetch)
    want(chosen.wanted, chosen.released, released)
    queue_out(points, values, chosen, True)
    sort_by(chosen.release, chosen.released, released, chosen.release_start, chosen.by_release)


@compiled
def _walk(layout: Layout, scratch: Scratch) -> tuple[float, int]:
    """Goes once through the points as the runtime does: seconds of the step, and bytes moved."""
    points, values, rates = layout.points, layout.values, layout.rates
    decisions, needed, chosen, clock = scratch.decisions, scratch.needed, scratch.chosen, scratch.clock
    start_clock(layout, decisions, clock)
    replay_s, moved_bytes, out, run = 0.0, 0, 0, 0
    queued = chosen.release_start[len(points.tick)]
    for point in range(len(points.tick)):
        while out < queued and chosen.queued_at[out] == point:
            value = chosen.queued[out]
            reach(layout, clock, points.op[point])
            take(layout, clock, rates.out_s)
            queue_copy(values, clock, value, True)
            moved_bytes += values.moved_bytes[value]
            out += 1
        for value in chosen.by_release[chosen.release_start[point] : chosen.release_start[point + 1]]:
            reach(layout, clock, points.op[point])
            wait_for(layout, clock, clock.is_out, value)
            clock.release_tick[value] = points.tick[point]
        for value in chosen.by_prefetch[chosen.prefetch_start[point] : chosen.prefetch_start[point + 1]]:
            moved_bytes += _fetch(layout, scratch, point, value)
        if run < needed.counts[REPLAYS] and needed.replay_point[run] == point:
            entry = needed.entry[run]
            moved_bytes += _replay(layout, scratch, point, entry)
            replay_s += scratch.store.seconds[entry]
            run += 1
        used = points.first_use_of[point]
        if used >= 0 and decisions[used] == SWAP:
            moved_bytes += _fetch(layout, scratch, point, used)
            _wait_in(layout, scratch, point, used)
    recording_s = finish(layout, clock)
    seconds = clock.seconds
    added_s = seconds[RUNTIME_S] + recording_s
    return layout.step_s + replay_s + seconds[STALL_S] + seconds[INTERFERENCE_S] + added_s, moved_bytes


@compiled
def _fetch(layout: Layout, scratch: Scratch, point: int, value: int) -> int:
    """Queues the copy back of a value that is away; returns its bytes."""
    clock = scratch.clock
    if clock.release_tick[value] < 0 or clock.back_tick[value] >= 0:
        return 0
    reach(layout, clock, layout.points.op[point])
    take(layout, clock, layout.rates.fetch_s)
    queue_copy(layout.values, clock, value, False)
    clock.back_tick[value] = layout.points.tick[point]
    clock.is_arriving[value] = True
    moved_bytes: int = layout.values.moved_bytes[value]
    return moved_bytes


@compiled
def _wait_in(layout: Layout, scratch: Scratch, point: int, value: int) -> None:
    clock = scratch.clock
    if clock.is_arriving[value]:
        clock.is_arriving[value] = False
        reach(layout, clock, layout.points.op[point])
        wait_for(layout, clock, clock.is_in, value)


@compiled
def _replay(layout: Layout, scratch: Scratch, point: int, entry: int) -> int:
    """Brings back what a replay starts from, and runs it; returns the bytes of copies."""
    store, moved_bytes = scratch.store, 0
    begin = store.start[entry] + store.targets[entry]
    for source in store.pool[begin : begin + store.inputs[entry]]:
        moved_bytes += _fetch(layout, scratch, point, source)
        _wait_in(layout, scratch, point, source)
    reach(layout, scratch.clock, layout.points.op[point])
    run_replay(layout, scratch.clock, store, entry)
    return moved_bytes


@compiled
def _peak_bytes(layout: Layout, scratch: Scratch) -> int:
    """Most bytes live at any tick, of this step or of the first one (``lives``)."""
    values, needed, change = layout.values, scratch.needed, scratch.chosen.change
    ticks = layout.points.tick
    last = layout.tick_count - 1
    change[:] = 0
    for value in range(layout.value_count):
        size_bytes, death, end = values.size_bytes[value], values.death[value], needed.end[value]
        release, back = scratch.clock.release_tick[value], scratch.clock.back_tick[value]
        until = max(death, end)
        if scratch.decisions[value] == RECOMPUTE:
            until = death
            point = needed.back_point[value]
            back = ticks[point] if point >= 0 else -1
        elif release >= 0:
            until = max(death, release - 1)
        put(change, values.born[value], min(until, last), size_bytes)
        if back >= 0:
            put(change, back, min(max(end, back), last), size_bytes)
    return _most(layout, scratch, change)


@compiled
def _most(layout: Layout, scratch: Scratch, change: Ints) -> int:
    """The most of a curve given by its differences, replays included, which run at their ticks."""
    needed, store, ticks = scratch.needed, scratch.store, layout.points.tick
    live, most, run = 0, 0, 0
    for tick in range(layout.tick_count):
        live += change[tick]
        now = live + layout.base_bytes[tick]
        if run < needed.counts[REPLAYS] and ticks[needed.replay_point[run]] == tick:
            now = max(now, now - needed.bytes[run] + store.peak_bytes[needed.entry[run]])
            run += 1
        most = max(most, now, now - layout.first_step_less_bytes[tick])
    return most
