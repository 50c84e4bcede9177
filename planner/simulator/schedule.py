"""A schedule: what happens at which point of the runtime's clock, and when ops are recorded for replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """``late``: when memory asks for it. ``early``: as soon as forward lets go of the value."""
    prefetch: Literal["early", "on_demand"] = "early"
    in_order: bool = True
    """Copies back are queued strictly in the order of need; else a later one may overtake one that has no room yet."""


@dataclass(frozen=True)
class Tuning:
    """What one schedule does otherwise than its style says, where memory permits."""

    replay_at: Mapping[int, int] = field(default_factory=dict)
    """Recomputed value -> use point of its replay, at or before its first use; in this order at one point."""
    stay_until: Mapping[int, int] = field(default_factory=dict)
    """Swapped value -> first point at which it may be released."""
    out_from: Mapping[int, int] = field(default_factory=dict)
    """Swapped value -> first point at which its copy out may be queued."""
    fetch_from: Mapping[int, int] = field(default_factory=dict)
    """Swapped value -> first point at which its copy back may be queued."""
    out_order: tuple[int, ...] = ()
    """The queue outwards; values not in it follow in the style's order."""
    release_order: tuple[int, ...] = ()
    """Which value is released first when memory asks; values not in it follow in the order of the queue."""
    fetch_order: tuple[int, ...] = ()
    """The queue inwards; values not in it follow in the order of need."""


AS_STYLED = Tuning()


MERGE_GAP_OPS = 4
"""Two windows with fewer ops between them are one: switching costs about as much as recording these."""


@dataclass(frozen=True)
class Recording:
    """Windows in which ops are recorded."""

    from_start: bool
    switches: dict[int, Literal["on", "off"]]
    """Save point (saved value) -> what happens there."""


NOTHING_RECORDED = Recording(from_start=False, switches={})


def recording_of(problem: Problem, decisions: Sequence[Decision]) -> Recording:
    """Windows that hold all that replays of the recomputed values need recorded."""
    recompute, replays = Decision.RECOMPUTE, problem.replay.replays
    chosen = [value for value, decision in enumerate(decisions) if decision is recompute and replays[value] is not None]
    return recording_for(problem.replay.recorded_for(chosen), problem.save_op_array) if chosen else NOTHING_RECORDED


def recording_for(ops: Ints, save_ops: Ints) -> Recording:
    """Windows that hold every op of ``ops``, which ascend; ``save_ops`` are the ops completed before each save point.

    A pack happens inside an op, so a switch at a save point takes effect from the op after the next one: for op ``j``
    the last save point with ``save_ops < j`` switches on, and the first one with ``save_ops > j`` switches off. Two
    windows with fewer than ``MERGE_GAP_OPS`` ops between them are one.
    """
    if not len(ops):
        return NOTHING_RECORDED
    count = len(save_ops)
    on = np.searchsorted(save_ops, ops, side="left") - 1
    off = np.searchsorted(save_ops, ops, side="right")
    ends = np.append(save_ops, save_ops[-1] + ops[-1] + 1)  # a window that never closes leaves no gap behind it
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
    return Recording(from_start=int(on[0]) < 0, switches=switches)


Lists: TypeAlias = dict[int, dict[str, list[int]]]
"""Point -> field of ``PointActions`` -> values."""


@dataclass(frozen=True)
class Schedule:
    """Decisions, and the actions at each point at which something happens, in the order of the clock."""

    decisions: tuple[Decision, ...]
    actions: tuple[PointActions, ...]
    record_from_start: bool = False


def schedule_of(plan: Plan, problem: Problem) -> Schedule:
    """The schedule that a plan holds; ``problem`` is of the profile it was made from."""
    assert len(plan.values) == problem.value_count, "the plan was made from another profile"
    return Schedule(tuple(value.decision for value in plan.values), plan.schedule, plan.record_from_start)


def keep_all(problem: Problem) -> Schedule:
    """Everything kept: the in-core step."""
    return Schedule((Decision.KEEP,) * problem.value_count, ())


def assemble(problem: Problem, decisions: Sequence[Decision], lists: Lists, *, recorded: bool = True) -> Schedule:
    """A schedule of what ``lists`` says happens at each point (field of ``PointActions`` -> values), with recording."""
    is_paid_for = problem.launch_cost is not None and problem.launch_cost.record_s > 0
    recording = recording_of(problem, decisions) if recorded or is_paid_for else NOTHING_RECORDED
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


def with_recording(problem: Problem, schedule: Schedule) -> Schedule:
    """The same schedule, with recording for all that it replays."""
    return assemble(problem, schedule.decisions, lists_of(problem, schedule))


def lists_of(problem: Problem, schedule: Schedule) -> Lists:
    """What happens at each point of a schedule, as :func:`assemble` takes it."""
    points = {"save": problem.save_points, "use": problem.use_points}
    return {
        points[action.at][action.index]: {
            "swap_out": list(action.swap_out),
            "release": list(action.release),
            "prefetch": list(action.prefetch),
            "replay": list(action.replay),
        }
        for action in schedule.actions
    }
