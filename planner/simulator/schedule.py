"""A schedule: the actions at each point of the runtime's clock, and when ops are recorded for replays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from poochplan.formats.occupancy import Ints
from poochplan.formats.plan import Decision, Plan, PointActions
from poochplan.planner.simulator.problem import Problem


@dataclass(frozen=True)
class Style:
    """How decisions are turned into a schedule."""

    release: Literal["late", "early"] = "late"
    """``late``: when its bytes are needed. ``early``: at the value's forward death."""
    prefetch: Literal["early", "on_demand"] = "early"
    in_order: bool = True
    """Whether copies back are queued strictly in the order of need. Else one may overtake another that has no room."""


@dataclass(frozen=True)
class Tuning:
    """Differences of one schedule from its style, applied if memory permits."""

    replay_at: Mapping[int, int] = field(default_factory=dict)
    """By recomputed value: the use point of its replay, at or before its first use; in this order at one point."""
    stay_until: Mapping[int, int] = field(default_factory=dict)
    """By swapped value: the first point at which it may be released."""
    out_from: Mapping[int, int] = field(default_factory=dict)
    """By swapped value: the first point at which its copy out may be queued."""
    fetch_from: Mapping[int, int] = field(default_factory=dict)
    """By swapped value: the first point at which its copy back may be queued."""
    out_order: tuple[int, ...] = ()
    """The queue outwards; other values follow in the style's order."""
    release_order: tuple[int, ...] = ()
    """The order of releases; other values follow in the order of the queue."""
    fetch_order: tuple[int, ...] = ()
    """The queue inwards; other values follow in the order of need."""


AS_STYLED = Tuning()


MERGE_GAP_OPS = 4
"""Two windows with fewer ops between them become one: a switch takes about as long as recording these ops."""


Recording: TypeAlias = tuple[bool, dict[int, Literal["on", "off"]]]
"""Windows in which ops are recorded: whether one begins with the step; the switches by save point (saved value)."""


def recording_of(problem: Problem, decisions: Sequence[Decision]) -> Recording:
    """Windows with all ops that must be recorded for replays of the recomputed values."""
    chosen = [value for value, decision in enumerate(decisions) if decision is Decision.RECOMPUTE]
    chosen = [value for value in chosen if problem.replay.replays[value] is not None]
    return recording_for(problem.replay.recorded_for(chosen), problem.save_op_array) if chosen else (False, {})


def recording_for(ops: Ints, save_ops: Ints) -> Recording:
    """Windows with every op of ``ops``, in ascending order; ``save_ops`` are the ops completed before each save point.

    A pack happens inside an op, so a switch at a save point takes effect from the op after the next one. For op ``j``
    the last save point with ``save_ops < j`` switches on, and the first one with ``save_ops > j`` switches off. See
    also ``MERGE_GAP_OPS``.
    """
    if not len(ops):
        return False, {}
    count = len(save_ops)
    on = np.searchsorted(save_ops, ops, side="left") - 1
    off = np.searchsorted(save_ops, ops, side="right")
    ends = np.append(save_ops, save_ops[-1] + ops[-1] + 1)  # a window that never closes has no gap after it
    begins = np.ones(len(ops), dtype=bool)
    begins[1:] = (on[1:] >= 0) & (save_ops[on[1:]] - ends[off[:-1]] >= MERGE_GAP_OPS)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(ops)) - 1
    switches: dict[int, Literal["on", "off"]] = {}
    for begin, end in zip(on[first].tolist(), off[last].tolist(), strict=True):
        if begin >= 0:
            switches[begin] = "on"
        if end < count:
            switches[end] = "off"
    return int(on[0]) < 0, switches


MOVES = ("swap_out", "release", "prefetch", "replay")
Lists: TypeAlias = dict[int, dict[str, list[int]]]
"""By point, by a field of ``PointActions`` (:data:`MOVES`): values."""


def by_point(**moves: Iterable[tuple[int, int]]) -> Lists:
    """The actions at each point; ``moves`` has the values of each action with their points, in order."""
    lists: Lists = {}
    for action, placed in moves.items():
        for value, point in placed:
            lists.setdefault(point, {}).setdefault(action, []).append(value)
    return lists


@dataclass(frozen=True)
class Schedule:
    """Decisions, and the points that have actions, in the order of the clock."""

    decisions: tuple[Decision, ...]
    actions: tuple[PointActions, ...]
    record_from_start: bool = False


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of a plan."""
    return Schedule(tuple(value.decision for value in plan.values), plan.schedule, plan.record_from_start)


def keep_all(problem: Problem) -> Schedule:
    """The schedule that keeps everything: the in-core step."""
    return Schedule((Decision.KEEP,) * problem.value_count, ())


def assemble(problem: Problem, decisions: Sequence[Decision], lists: Lists) -> Schedule:
    """A schedule with the actions of ``lists`` and its recording windows."""
    from_start, found = recording_of(problem, decisions)
    switches = {problem.save_points[value]: switch for value, switch in found.items()}
    actions = tuple(
        PointActions(
            at="save" if problem.point_is_save[point] else "use",
            index=problem.point_index[point],
            record=switches.get(point, ""),
            **{name: tuple(values) for name, values in lists.get(point, {}).items()},
        )
        for point in sorted({*lists, *switches})
    )
    return Schedule(tuple(decisions), actions, from_start)


def points_of(problem: Problem, schedule: Schedule, action: str) -> dict[int, int]:
    """By value: the point of one of its :data:`MOVES`, in the order in which they happen."""
    points = {"save": problem.save_points, "use": problem.use_points}
    return {value: points[there.at][there.index] for there in schedule.actions for value in getattr(there, action)}
