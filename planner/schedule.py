"""From decisions to a schedule: what happens at which point of the runtime's clock.

Swap-outs go in the order in which their bytes can be given up. A release happens when memory asks for it, at the last
point before the tick that asks; a prefetch in the order of need, as early as memory permits; a replay at the use point
of its value. A value that memory never asks to release is kept after all, and its copies are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .problem import Ints, Problem
from .recording import recording_for
from .schema import Decision, Plan, PointActions


@dataclass(frozen=True)
class Schedule:
    """Decisions, and the actions at each point at which something happens, in the order of the clock."""

    decisions: tuple[Decision, ...]
    actions: tuple[PointActions, ...]
    record_from_start: bool = False


@dataclass(frozen=True)
class Style:
    """How decisions are turned into a schedule."""

    release: Literal["late", "early"] = "late"
    """``late``: when memory asks for it. ``early``: as soon as forward lets go of the value."""
    prefetch: Literal["early", "on_demand"] = "early"
    in_order: bool = True
    """Copies back are queued strictly in the order of need; else a later one may overtake one that has no room yet."""


@dataclass(frozen=True)
class Needs:
    """When given decisions need which value back in backward, with every replay at the use point of its value."""

    back_point: tuple[int, ...]
    """Per value: the point that needs it on the device first; -1 when none does."""
    last_claim: Ints
    """Per value: the last tick at which a replay needs it; -1 when none does."""
    replays: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(point, value asked for, all values this replay brings back)."""


def needs_of(problem: Problem, decisions: Sequence[Decision]) -> Needs:
    """What ``decisions`` need back, and when."""
    back = [-1] * problem.value_count
    claim = np.full(problem.value_count, -1, dtype=np.int64)
    replays = []
    order = sorted((point, value) for value, point in enumerate(problem.first_use_point) if point >= 0)
    for point, value in order:
        if back[value] >= 0:
            continue
        if decisions[value] is not Decision.RECOMPUTE:
            back[value] = point
            continue
        targets = replay_closure(problem, decisions, value, back)
        for target in targets:
            back[target] = point
        replay = problem.replay.merged(targets)
        for source in _direct_inputs(problem, targets):
            claim[source] = problem.point_ticks[point]
        for source in replay.inputs:
            if back[source] < 0:
                back[source] = point
        replays.append((point, value, targets))
    claim_for_never_replayed(problem, decisions, back, claim)
    return Needs(tuple(back), claim, tuple(replays))


def replay_closure(problem: Problem, decisions: Sequence[Decision], value: int, back: Sequence[int]) -> tuple[int, ...]:
    """The values one replay of ``value`` brings back: itself and the recomputed values it starts from, not yet back."""
    targets = {value}
    pending = [value]
    while pending:
        replay = problem.replay.replays[pending.pop()]
        assert replay is not None
        for source in replay.inputs:
            if decisions[source] is Decision.RECOMPUTE and back[source] < 0 and source not in targets:
                targets.add(source)
                pending.append(source)
    return tuple(sorted(targets))


def claim_for_never_replayed(problem: Problem, decisions: Sequence[Decision], back: Sequence[int], claim: Ints) -> None:
    """Extends ``claim``: a recomputed value that never comes back claims its inputs as long as it is itself held."""
    replays = problem.replay.replays
    pending = [
        (replay.ops[-1], value, replay.inputs)
        for value, replay in enumerate(replays)
        if replay is not None and decisions[value] is Decision.RECOMPUTE and back[value] < 0
    ]
    for _, value, inputs in sorted(pending, reverse=True):  # what holds a value comes after it
        until = max(int(problem.freed[value]), int(claim[value]))
        for source in inputs:
            claim[source] = max(int(claim[source]), until)


def _direct_inputs(problem: Problem, targets: tuple[int, ...]) -> set[int]:
    inputs: set[int] = set()
    for target in targets:
        replay = problem.replay.replays[target]
        assert replay is not None
        inputs.update(replay.inputs)
    return inputs


def schedule_of(plan: Plan, problem: Problem) -> Schedule:
    """The schedule that a plan holds; ``problem`` is of the profile it was made from."""
    assert len(plan.values) == problem.value_count, "the plan was made from another profile"
    return Schedule(tuple(value.decision for value in plan.values), plan.schedule, plan.record_from_start)


def keep_all(problem: Problem) -> Schedule:
    """Everything kept: the in-core step."""
    return Schedule((Decision.KEEP,) * problem.value_count, ())


def fit(
    problem: Problem,
    decisions: Sequence[Decision],
    budget_bytes: int,
    style: Style | None = None,
    *,
    recorded: bool = True,
) -> Schedule:
    """A schedule of ``decisions`` that stays within ``budget_bytes`` where these decisions can.

    Swapped values that need no release are kept instead. Whether it fits is for the simulator to say. Without
    ``recorded`` it does not say when to record ops: enough for the simulator, not for the runtime.
    """
    fitted = _Fit(problem, decisions, budget_bytes, style or Style())
    return assemble(problem, fitted.decisions, fitted.actions(), recorded=recorded)


class _Fit:
    """State of one fitting: the memory curve so far, and the points chosen so far."""

    def __init__(self, problem: Problem, decisions: Sequence[Decision], budget_bytes: int, style: Style) -> None:
        self.problem, self.budget_bytes, self.style = problem, budget_bytes, style
        self.decisions = list(decisions)
        self.death = problem.forward_death.tolist()
        self.needs = needs_of(problem, decisions)
        self.end = np.maximum(problem.freed, self.needs.last_claim)
        self.back_tick = np.array(
            [problem.point_ticks[p] if p >= 0 else problem.tick_count for p in self.needs.back_point], dtype=np.int64
        )
        self.release: dict[int, int] = {}
        self.prefetch: dict[int, int] = {}
        self.curve = self._curve_unreleased()

    def actions(self) -> dict[int, dict[str, list[int]]]:
        """What happens at each point, as :func:`assemble` takes it; ``decisions`` are then the final ones."""
        if self.style.release == "early":
            for value in self._swapped():
                self._release_at(value, self._early_point(value))
        else:
            self._release_where_memory_asks()
        for value in self._swapped():
            if value not in self.release:
                self.decisions[value] = Decision.KEEP
        self._prefetch()
        return self._collect()

    def _swapped(self) -> list[int]:
        return [value for value, decision in enumerate(self.decisions) if decision is Decision.SWAP]

    def _curve_unreleased(self) -> Ints:
        problem = self.problem
        change = np.zeros(problem.tick_count + 2, dtype=np.int64)
        last = problem.tick_count - 1
        recomputed = np.array([decision is Decision.RECOMPUTE for decision in self.decisions])
        until = np.where(recomputed, problem.forward_death, np.maximum(problem.forward_death, self.end))
        np.add.at(change, problem.born, problem.rounded_bytes)
        np.subtract.at(change, np.minimum(until, last) + 1, problem.rounded_bytes)
        back = np.flatnonzero(recomputed & (self.back_tick < problem.tick_count))
        np.add.at(change, self.back_tick[back], problem.rounded_bytes[back])
        np.subtract.at(change, np.minimum(self.end[back], last) + 1, problem.rounded_bytes[back])
        curve: Ints = np.cumsum(change)[: problem.tick_count] + problem.base_bytes
        for point, _, targets in self.needs.replays:
            inside = problem.replay.merged(targets).peak_bytes - int(problem.rounded_bytes[list(targets)].sum())
            curve[problem.point_ticks[point]] += max(0, inside)
        return curve

    def _last_absent_tick(self, value: int) -> int:
        """Last tick at which a released value stays away."""
        back = int(self.back_tick[value])
        if back < self.problem.tick_count:
            return back - 1
        return int(min(max(self.problem.forward_death[value], self.end[value]), self.problem.tick_count - 1))

    def _release_at(self, value: int, point: int) -> None:
        problem = self.problem
        self.release[value] = point
        first = int(max(problem.forward_death[value] + 1, problem.point_ticks[point]))
        self.curve[first : self._last_absent_tick(value) + 1] -= problem.rounded_bytes[value]

    def _early_point(self, value: int) -> int:
        """The last save point before which forward has let go of the value, its own at the earliest."""
        problem = self.problem
        saves = np.asarray(problem.save_points)
        index = int(np.searchsorted(problem.point_ticks[saves], problem.forward_death[value] + 1, side="right")) - 1
        return problem.save_points[max(index, value)]

    def _release_where_memory_asks(self) -> None:
        problem = self.problem
        waiting = sorted(self._swapped(), key=lambda v: (max(problem.save_tick[v], problem.forward_death[v] + 1), v))
        tick = 0
        while True:
            over = np.flatnonzero(self.curve[tick:] > self.budget_bytes)
            if not len(over):
                return
            tick += int(over[0])
            point = int(np.searchsorted(problem.point_ticks, tick, side="right")) - 1
            for value in [v for v in waiting if self._helps(v, tick, point)]:
                self._release_at(value, point)
                waiting.remove(value)
                if self.curve[tick] <= self.budget_bytes:
                    break
            else:  # these decisions do not fit: release the rest early, so that what is missing is exact
                for value in waiting:
                    self._release_at(value, self._early_point(value))
                return

    def _helps(self, value: int, tick: int, point: int) -> bool:
        problem = self.problem
        return bool(
            problem.forward_death[value] < tick <= self._last_absent_tick(value) and problem.save_points[value] <= point
        )

    def _prefetch(self) -> None:
        problem = self.problem
        use_ticks = problem.point_ticks[list(problem.use_points)]
        needed = [value for value in self._swapped() if self.needs.back_point[value] >= 0]
        earliest = int(use_ticks[0]) if len(use_ticks) else 0
        for value in sorted(needed, key=lambda v: (self.needs.back_point[v], v)):
            point = self.needs.back_point[value]
            if self.style.prefetch == "early":
                gone = int(max(problem.point_ticks[self.release[value]], problem.forward_death[value])) + 1
                lowest = max(earliest, gone)
                room = self.budget_bytes - int(problem.rounded_bytes[value])
                full = np.flatnonzero(self.curve[lowest : self.back_tick[value]] > room)
                start = lowest + int(full[-1]) + 1 if len(full) else lowest
                use = int(np.searchsorted(use_ticks, start))
                if use < len(use_ticks):
                    point = min(point, problem.use_points[use])
            self.prefetch[value] = point
            self.curve[problem.point_ticks[point] : self.back_tick[value]] += problem.rounded_bytes[value]
            if self.style.in_order:
                earliest = int(problem.point_ticks[point])

    def _swap_out_points(self) -> dict[int, int]:
        """Where each copy out is queued: at its save point, unless its bytes cannot be given up for long.

        A value that forward still holds lets the others go first, as long as the link is busy.
        """
        problem = self.problem
        ticks, work_s = problem.point_tick_list, problem.point_work_list
        frees = {value: max(ticks[problem.save_points[value]], self.death[value] + 1) for value in self.release}
        issued: dict[int, int] = {}
        pending: list[int] = []
        link_free_s = 0.0
        last = problem.value_count - 1
        for index, point in enumerate(problem.save_points):
            if index in self.release:
                pending.append(index)
            if not pending:
                continue
            soon = len(ticks) - 1 if index == last else problem.save_points[index + 1]
            for value in sorted(pending, key=lambda v: (frees[v], v)):
                is_due = frees[value] <= ticks[soon] or self.release[value] <= soon
                if index == last or is_due or link_free_s <= work_s[soon]:
                    issued[value] = point
                    pending.remove(value)
                    link_free_s = max(link_free_s, work_s[point]) + problem.out_seconds(value)
        return issued

    def _collect(self) -> dict[int, dict[str, list[int]]]:
        lists: dict[int, dict[str, list[int]]] = {}

        def add(point: int, action: str, value: int) -> None:
            lists.setdefault(point, {}).setdefault(action, []).append(value)

        for value, point in self._swap_out_points().items():
            add(point, "swap_out", value)
        for value, point in self.release.items():
            add(point, "release", value)
        for value, point in self.prefetch.items():
            add(point, "prefetch", value)
        for point, value, _ in self.needs.replays:
            add(point, "replay", value)
        return lists


def assemble(
    problem: Problem,
    decisions: Sequence[Decision],
    lists: dict[int, dict[str, list[int]]],
    *,
    recorded: bool = True,
) -> Schedule:
    """A schedule of what ``lists`` says happens at each point (field of ``PointActions`` -> values), with recording."""
    needed_ops: set[int] = set()
    for value, decision in enumerate(decisions):
        replay = problem.replay.replays[value]
        if recorded and decision is Decision.RECOMPUTE and replay is not None:
            needed_ops.update(replay.ops)
    recording = recording_for(needed_ops, tuple(problem.point_ops[point] for point in problem.save_points))
    switches = {problem.save_points[value]: switch for value, switch in recording.switches.items()}
    actions = []
    for point in sorted({*lists, *switches}):
        is_save = problem.point_is_save[point]
        fields = {name: tuple(values) for name, values in lists.get(point, {}).items()}
        actions.append(
            PointActions(
                at="save" if is_save else "use",
                index=problem.point_index[point],
                swap_out=fields.get("swap_out", ()),
                release=fields.get("release", ()),
                prefetch=fields.get("prefetch", ()),
                replay=fields.get("replay", ()),
                record=switches.get(point, ""),
            )
        )
    return Schedule(tuple(decisions), tuple(actions), recording.from_start)
