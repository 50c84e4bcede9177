"""Constructive scheduling: points for releases, copies and replays of given decisions, within a budget if possible.

* Copies out are queued in the order in which their bytes can be released.
* A value is released at the last point before the tick that needs its bytes. If no tick needs them, it is kept.
* Prefetches are queued in the order of need, as early as memory permits.
* A replay runs at the use point of its value.
* A swapped value is away from its release to the next point that needs it: before the first replay that starts from
  it, between two such replays, or between the last one and its own use.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from poochplan.formats.occupancy import Ints, occupancy
from poochplan.formats.plan import Decision
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.replays import MergedReplay
from poochplan.planner.simulator.schedule import AS_STYLED, Lists, Schedule, Style, Tuning, assemble, by_point


def needs_of(
    problem: Problem, decisions: Sequence[Decision], replay_at: Mapping[int, int]
) -> tuple[list[list[int]], Ints, list[tuple[int, int, MergedReplay]]]:
    """When ``decisions`` need each value in backward. Per value: the points up to its first use that need it on the
    device, in order; and the last tick at which a replay needs it, -1 if none does. And the replays: (point, requested
    value, its replay), in the order in which they run.

    A replay is at the first use of its value, or earlier, at the use point that ``replay_at`` has for the value. At one
    point these earlier replays come first, in the order of ``replay_at``.
    """
    count = problem.value_count
    back = [-1] * count
    points: list[list[int]] = [[] for _ in range(count)]
    claim = np.full(count, -1, dtype=np.int64)
    replays = []
    requests = [(point, len(replay_at), value) for value, point in enumerate(problem.first_use_point) if point >= 0]
    for position, (value, point) in enumerate(replay_at.items()):
        if decisions[value] is Decision.RECOMPUTE and may_replay_at(problem, value, point):
            requests.append((point, position, value))
    for point, _, value in sorted(requests):
        if decisions[value] is not Decision.RECOMPUTE:
            points[value].append(point)
            continue
        if back[value] >= 0:
            continue
        replay = replay_for(problem, decisions, value, back)
        for target in replay.targets:
            back[target] = point
            for source in problem.replay.of(target).inputs:
                claim[source] = problem.point_ticks[point]
        for source in replay.inputs:
            use = problem.first_use_point[source]
            if use < 0 or point < use:
                points[source].append(point)
        replays.append((point, value, replay))
    claim_for_never_replayed(problem, decisions, back, claim)
    return points, claim, replays


def may_replay_at(problem: Problem, value: int, point: int) -> bool:
    """Whether a replay of ``value`` may run at a use point: its inputs are still held, and the gathered weights that it
    reads have memory.
    """
    use, tick = problem.first_use_point[value], problem.point_tick_list[point]
    earliest = problem.replay.earliest_tick
    is_gathered = not earliest or tick >= earliest[value]
    return is_gathered and (point <= use if use >= 0 else tick <= problem.freed[value])


def replay_for(problem: Problem, decisions: Sequence[Decision], value: int, back: Sequence[int]) -> MergedReplay:
    """The replay that brings back ``value``, and the recomputed inputs that are not back yet."""
    targets = {value}
    pending = [value]
    while pending:
        for source in problem.replay.of(pending.pop()).inputs:
            if decisions[source] is Decision.RECOMPUTE and back[source] < 0 and source not in targets:
                targets.add(source)
                pending.append(source)
    return problem.replay.merged(tuple(sorted(targets)))


def claim_for_never_replayed(problem: Problem, decisions: Sequence[Decision], back: Sequence[int], claim: Ints) -> None:
    """Extends ``claim``: a recomputed value that never comes back claims its inputs while it is itself held."""
    pending = [
        (replay.ops[-1], value, replay.inputs)
        for value, replay in enumerate(problem.replay.replays)
        if replay is not None and decisions[value] is Decision.RECOMPUTE and back[value] < 0
    ]
    for _, value, inputs in sorted(pending, reverse=True):  # a value's holders come after it
        until = max(int(problem.freed[value]), int(claim[value]))
        for source in inputs:
            claim[source] = max(int(claim[source]), until)


def lives(
    problem: Problem, decisions: Sequence[Decision], claim: Ints, release_tick: Sequence[int], back_tick: Sequence[int]
) -> tuple[Ints, Ints, Ints]:
    """Per saved value: last tick of its forward life, then first and last tick of its second life; -1 without one.
    ``release_tick`` and ``back_tick`` are -1 for a value that is not released, or does not come back.
    """
    last, death = problem.tick_count - 1, problem.forward_death
    end = np.maximum(problem.freed, claim)
    release, back = np.array(release_tick, dtype=np.int64), np.array(back_tick, dtype=np.int64)
    recomputed = np.array([decision is Decision.RECOMPUTE for decision in decisions])
    first_end = np.maximum(death, np.where(recomputed, death, np.where(release >= 0, release - 1, end)))
    return np.minimum(first_end, last), back, np.where(back >= 0, np.minimum(np.maximum(end, back), last), -1)


def memory_of(problem: Problem, spans: tuple[Ints, Ints, Ints], runs: Iterable[tuple[int, MergedReplay]]) -> Ints:
    """Most bytes live at each tick, with saved values live as in ``spans`` (:func:`lives`), including inside replays,
    of which ``runs`` has the ticks.
    """
    first_end, back, end = spans
    size_bytes, again = problem.rounded_bytes, np.flatnonzero(back >= 0)
    live = occupancy(
        problem.tick_count, (problem.born, first_end, size_bytes), (back[again], end[again], size_bytes[again])
    )
    memory: Ints = live + problem.base_bytes
    by_tick: dict[int, list[MergedReplay]] = {}
    for tick, replay in runs:
        by_tick.setdefault(tick, []).append(replay)
    for tick, there in by_tick.items():
        memory[tick] = max(memory[tick], *inside_replays(problem, there, int(memory[tick])))
    return memory


def inside_replays(problem: Problem, there: Sequence[MergedReplay], after_bytes: int) -> list[int]:
    """Most bytes live inside each of the replays of one tick, in order; ``after_bytes`` are live after them."""
    target_bytes = [int(problem.rounded_bytes[list(replay.targets)].sum()) for replay in there]
    before_bytes = accumulate(target_bytes, initial=after_bytes - sum(target_bytes))
    return [live + replay.peak_bytes for live, replay in zip(before_bytes, there, strict=False)]


LOOK_TICKS = 512
"""Number of ticks that are searched at a time: a tick over the budget is usually near."""


class _Scheduler:
    """State of one fitting: the memory curve so far, and the points chosen so far."""

    def __init__(
        self, problem: Problem, decisions: Sequence[Decision], budget_bytes: int, style: Style, tuning: Tuning
    ) -> None:
        self.problem, self.budget_bytes, self.style, self.tuning = problem, budget_bytes, style, tuning
        self.decisions = list(decisions)
        self.ticks = problem.point_tick_list
        self.death: list[int] = problem.forward_death.tolist()
        self.size: list[int] = problem.rounded_bytes.tolist()
        self.needed, claim, self.replays = needs_of(problem, decisions, tuning.replay_at)
        self.end = np.maximum(problem.freed, claim)
        self.release: dict[int, int] = {}
        self.back: dict[int, int] = {}
        """Per released value: the point that needs it next; -1 if none does."""
        self.prefetch: dict[int, int] = {}
        runs = [(self.ticks[point], replay) for point, _, replay in self.replays]
        back_tick = [-1] * len(self.size)
        for tick, replay in runs:
            for target in replay.targets:
                back_tick[target] = tick
        spans = lives(problem, decisions, claim, [-1] * len(self.size), back_tick)
        self.curve = memory_of(problem, spans, runs)

    def actions(self) -> Lists:
        """The actions at each point, in the form for ``assemble``. Afterwards ``decisions`` are final."""
        copies, swapped = self.problem.copies, list[int]()
        for value, decision in enumerate(self.decisions):
            # Nothing holds a source after its forward death if no replay starts from it.
            if decision is Decision.SWAP and (value not in copies or int(self.end[value]) > self.death[value]):
                swapped.append(value)
        if self.style.release == "early":
            for value in swapped:
                self._release_at(value, self._early_point(value))
        else:
            self._release_where_memory_asks(swapped)
        for value, decision in enumerate(self.decisions):
            if decision is Decision.SWAP and value not in self.release:
                self.decisions[value] = Decision.KEEP
        self._prefetch()
        return by_point(
            swap_out=self._queue(list(self.release)).items(),
            release=self.release.items(),
            prefetch=self.prefetch.items(),
            replay=((value, point) for point, value, _ in self.replays),
        )

    # -- releases -----------------------------------------------------------------------------------------------------

    def _need_after(self, value: int, point: int) -> int:
        """The first point that needs a value released at ``point``; -1 if none does."""
        needed = self.needed[value]
        index = bisect_left(needed, point)
        return needed[index] if index < len(needed) else -1

    def _last_absent_tick(self, value: int, point: int) -> int:
        """Last tick at which a value released at ``point`` stays away; -1 if it must not leave any more."""
        back = self._need_after(value, point)
        if back >= 0:
            return self.ticks[back] - 1
        if self.problem.first_use_point[value] >= 0:
            return -1
        return min(max(self.death[value], int(self.end[value])), self.problem.tick_count - 1)

    def _release_at(self, value: int, point: int) -> None:
        self.release[value] = point
        self.back[value] = self._need_after(value, point)
        first = max(self.death[value] + 1, self.ticks[point])
        self.curve[first : max(first, self._last_absent_tick(value, point) + 1)] -= self.size[value]

    def _early_point(self, value: int) -> int:
        """The last save point up to the tick after the value's forward death; its own save point if that is later."""
        index = int(np.searchsorted(self.problem.save_tick, self.death[value] + 1, side="right")) - 1
        return self.problem.save_points[max(index, value)]

    def _release_where_memory_asks(self, swapped: Sequence[int]) -> None:
        queued = {value: position for position, value in enumerate(self._queue(swapped))}
        first = {value: position for position, value in enumerate(self.tuning.release_order)}
        waiting = sorted(swapped, key=lambda v: (first.get(v, len(first)), queued[v]))
        tick = 0
        while True:
            tick = self._next_over(tick)
            if tick < 0:
                return
            point = bisect_right(self.ticks, tick) - 1
            released = self._released_for(tick, point, waiting)
            for value in released:
                self._release_at(value, point)
            gone = set(released)
            waiting = [value for value in waiting if value not in gone]
            if self.curve[tick] > self.budget_bytes:
                # These decisions do not fit. The others are released early, so that the missing bytes are exact.
                for value in waiting:
                    self._release_at(value, self._early_point(value))
                return

    def _next_over(self, tick: int) -> int:
        """The first tick from ``tick`` on that exceeds the budget; -1 if none does."""
        for begin in range(tick, len(self.curve), LOOK_TICKS):
            over = np.flatnonzero(self.curve[begin : begin + LOOK_TICKS] > self.budget_bytes)
            if len(over):
                return begin + int(over[0])
        return -1

    def _released_for(self, tick: int, point: int, waiting: Sequence[int]) -> list[int]:
        """The first values of ``waiting`` that make ``tick`` fit, without those that turn out to be unnecessary.

        Each value that helps removes its bytes from the tick, so sums show how many are needed and which may stay.
        """
        over_bytes = int(self.curve[tick]) - self.budget_bytes
        helping, helped_bytes = [], 0
        for value in waiting:
            is_there = self.death[value] < tick and self.problem.save_points[value] <= point
            may_leave = self.tuning.stay_until.get(value, 0) <= point
            if is_there and may_leave and tick <= self._last_absent_tick(value, point):
                helping.append(value)
                helped_bytes += self.size[value]
                if helped_bytes >= over_bytes:
                    break
        spare_bytes = helped_bytes - over_bytes
        released = helping[-1:]
        for value in reversed(helping[:-1]):  # the wait for the last in the queue is the longest
            if self.size[value] <= spare_bytes:
                spare_bytes -= self.size[value]
            else:
                released.append(value)
        return released[::-1]

    # -- copies -------------------------------------------------------------------------------------------------------

    def _prefetch(self) -> None:
        problem = self.problem
        use_ticks = problem.use_ticks
        order = {value: position for position, value in enumerate(self.tuning.fetch_order)}
        needed = [value for value, back in self.back.items() if back >= 0]
        earliest = use_ticks[0] if use_ticks else 0
        for value in sorted(needed, key=lambda v: (order.get(v, len(order)), self.back[v], v)):
            point = self.back[value]
            back_tick = self.ticks[point]
            if self.style.prefetch == "early":
                gone = max(self.ticks[self.release[value]], self.death[value]) + 1
                lowest = max(earliest, gone)
                if value in self.tuning.fetch_from:
                    lowest = max(lowest, self.ticks[self.tuning.fetch_from[value]])
                full = np.flatnonzero(self.curve[lowest:back_tick] > self.budget_bytes - self.size[value])
                start = lowest + int(full[-1]) + 1 if len(full) else lowest
                use = bisect_left(use_ticks, start)
                if use < len(use_ticks):
                    point = min(point, problem.use_points[use])
            self.prefetch[value] = point
            self.curve[self.ticks[point] : back_tick] += self.size[value]
            if self.style.in_order:
                earliest = self.ticks[point]

    def _queue(self, values: Sequence[int]) -> dict[int, int]:
        """By value, in the order of the queue: the point at which its copy out is queued.

        A copy is queued at its save point. But if forward still holds the value, other copies go first while the link
        is busy.
        """
        if self.tuning.out_order or self.tuning.out_from:
            return self._queue_as_told(values)
        problem = self.problem
        ticks, work_s = self.ticks, problem.point_work_list
        wanted = set(values)
        frees = {value: max(ticks[problem.save_points[value]], self.death[value] + 1) for value in values}
        released = self.release
        issued: dict[int, int] = {}
        pending: list[int] = []
        link_free_s = 0.0
        last = problem.value_count - 1
        for index, point in enumerate(problem.save_points):
            if index in wanted:
                pending.append(index)
            if not pending:
                continue
            soon = len(ticks) - 1 if index == last else problem.save_points[index + 1]
            for value in sorted(pending, key=lambda v: (frees[v], v)):
                is_due = frees[value] <= ticks[soon] or released.get(value, soon + 1) <= soon
                if index == last or is_due or link_free_s <= work_s[soon]:
                    issued[value] = point
                    pending.remove(value)
                    link_free_s = max(link_free_s, work_s[point]) + problem.out_seconds(value)
        return issued

    def _queue_as_told(self, values: Sequence[int]) -> dict[int, int]:
        """The same in the tuning's order. A copy that would be queued after its release goes first."""
        problem, tuning = self.problem, self.tuning
        place = {value: position for position, value in enumerate(tuning.out_order)}

        def by_default(value: int) -> tuple[int, int, int]:
            save = problem.save_points[value]
            return place.get(value, len(place)), max(self.ticks[save], self.death[value] + 1), value

        issued: dict[int, int] = {}
        before = 0
        for value in sorted(values, key=by_default):
            own = max(problem.save_points[value], tuning.out_from.get(value, 0))
            issued[value] = before = max(own, before)
        issued = {value: min(point, self.release.get(value, point)) for value, point in issued.items()}
        return dict(sorted(issued.items(), key=lambda item: item[1]))


def fit(
    problem: Problem,
    decisions: Sequence[Decision],
    budget_bytes: int,
    style: Style | None = None,
    tuning: Tuning = AS_STYLED,
) -> Schedule:
    """A schedule of ``decisions`` within ``budget_bytes`` if possible; only the simulator tells whether it fits.

    Swapped values that need no release are kept instead.
    """
    fitting = _Scheduler(problem, decisions, budget_bytes, style or Style(), tuning)
    lists = fitting.actions()
    return assemble(problem, fitting.decisions, lists)
