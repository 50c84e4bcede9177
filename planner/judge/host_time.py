"""What the runtime itself takes of the calling thread in a planned step, beside what the simulator knows of."""

from __future__ import annotations

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Phase, Profile
from poochplan.planner.problem.problem import Problem
from poochplan.planner.schedule.schedule import Schedule


def runtime_seconds(profile: Profile, problem: Problem, schedule: Schedule) -> float:
    """Seconds for handles, swapped values and recorded ops; 0 where the profile does not say what they cost."""
    if profile.runtime is None:
        return 0.0
    swapped = sum(decision is Decision.SWAP for decision in schedule.decisions)
    return (
        profile.runtime.handle_s * len(profile.handles)
        + profile.runtime.swap_s * swapped
        + profile.runtime.record_s * recorded_ops(profile, problem, schedule)
    )


def recorded_ops(profile: Profile, problem: Problem, schedule: Schedule) -> int:
    """Ops of forward inside of the schedule's recording windows."""
    forward = sum(op.phase is Phase.FORWARD for op in profile.ops)
    switches = {action.index: action.record for action in schedule.actions if action.at == "save" and action.record}
    count, begin = 0, 0 if schedule.record_from_start else -1
    for index in sorted(switches):
        at = profile.points[problem.save_points[index]].op
        if switches[index] == "on" and begin < 0:
            begin = at
        elif switches[index] == "off" and begin >= 0:
            count, begin = count + at - begin, -1
    return count + (forward - begin if begin >= 0 else 0)
