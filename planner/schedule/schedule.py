"""From decisions to a schedule: what happens at which point of the runtime's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poochplan.formats.plan import Decision, Plan, PointActions
from poochplan.planner.problem.problem import Problem

from .construct import Fitting, Lists
from .recording import NOTHING_RECORDED, recording_of
from .style import AS_STYLED, Style, Tuning


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


def fit(
    problem: Problem,
    decisions: Sequence[Decision],
    budget_bytes: int,
    style: Style | None = None,
    tuning: Tuning = AS_STYLED,
    *,
    recorded: bool = True,
) -> Schedule:
    """A schedule of ``decisions`` that stays within ``budget_bytes`` where these decisions can.

    Swapped values that need no release are kept instead. Whether it fits is for the simulator to say. Without
    ``recorded`` it does not say when to record ops, unless that takes time: enough for the simulator, not for the
    runtime.
    """
    fitting = Fitting(problem, decisions, budget_bytes, style or Style(), tuning)
    lists = fitting.actions()
    return assemble(problem, fitting.decisions, lists, recorded=recorded)


def assemble(
    problem: Problem,
    decisions: Sequence[Decision],
    lists: Lists,
    *,
    recorded: bool = True,
) -> Schedule:
    """A schedule of what ``lists`` says happens at each point (field of ``PointActions`` -> values), with recording."""
    is_paid_for = problem.lane is not None and problem.lane.record_s > 0
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
