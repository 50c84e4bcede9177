"""What the launching thread takes of the profiled model's own steps, if it works ahead of a device: the processor's
seconds of plain steps, and of steps that keep, record and recompute, whatever the device does meanwhile.

A launch is what a plain step takes: so it has the model's own Python between two ops. All that a session does for a
handle counts, and not the time within hooks alone. Kinds of steps take turns, because a busy machine is slower for some
seconds. Swaps take as long as on the small network, whose copies are real: here they would stay on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

import msgspec

from poochplan.formats.plan import Decision
from poochplan.formats.profile import Phase, Profile
from poochplan.planner.simulator.problem import Problem
from poochplan.profiler.assembly.reconcile import PhaseSeconds
from poochplan.profiler.trials.compare import instructions_for
from poochplan.runtime.step_policies.follow import Follow, IndexedPlan
from poochplan.runtime.step_policies.step_policy import SwapEach

from .after_capture import HookSeconds, TimedSteps
from .own_costs import Own, every_other, has_short_ops, recorded_ops, replayed_ops
from .segment_observer import NewObserver, StudyContext

LEAST_TURNS, MOST_TURNS, MOST_S = 5, 16, 4.0
"""Of each kind of step, the first of which does not count: many of short steps, whose quickest is then undisturbed."""


class _Thread(NamedTuple):
    """The processor's seconds of a step."""

    forward_s: float
    backward_s: float


def phase_launches(profile: Profile, steps: Sequence[PhaseSeconds]) -> dict[Phase, float]:
    """By phase: the processor's seconds of one op in the quickest of these steps, which have no hooks in them."""
    counts = Counter(op.phase for op in profile.ops)
    return {phase: min(step[phase] for step in steps) / count for phase, count in counts.items()}


def launch_costs(context: StudyContext, profile: Profile) -> Generator[NewObserver, Any, Own]:
    """Asks for the steps; returns the costs that they tell: none if ops are long, or a step diverged."""
    if not has_short_ops(profile):
        return {}
    problem, plain = Problem.of(profile), TimedSteps(context, lambda: None)
    kept = [Decision.KEEP] * problem.value_count
    recompute = every_other(Decision.RECOMPUTE, problem)
    tried = [(kept, False), (kept, True), (recompute, True)]
    with ExitStack() as stack:
        planned = [_steps(context, profile, wish, is_recorded=is_recorded) for wish, is_recorded in tried]
        for steps in (plain, *planned):
            stack.enter_context(closing(steps))
        fitting = int(MOST_S / (profile.times.step_s * (1 + len(planned))))
        for _ in range(min(MOST_TURNS, max(LEAST_TURNS, fitting))):
            for steps in (plain, *planned):
                yield from steps.several(1)
    if not all(steps.have_followed for steps in planned):
        return {}
    launches = phase_launches(profile, plain.launching_s[1:])
    own, keep, record, replay = map(_quickest, (plain, *planned))
    handles = max(1, len(profile.handles))
    replayed, recorded = max(1, replayed_ops(problem, recompute)[0]), max(1, recorded_ops(problem))
    dropped = max(1, recompute.count(Decision.RECOMPUTE))
    pack_s = max(0.0, keep.forward_s - own.forward_s) / handles
    unpack_s = max(0.0, keep.backward_s - own.backward_s) / handles
    return {
        "phase_launch_s": launches,
        "handle_s": pack_s + unpack_s,
        "unpack_s": unpack_s,
        "record_s": max(0.0, record.forward_s - keep.forward_s) / recorded,
        "drop_s": max(0.0, replay.forward_s - record.forward_s) / dropped,
        "replay_s": max(0.0, (replay.backward_s - record.backward_s) / replayed - launches[Phase.FORWARD]),
    }


def _steps(context: StudyContext, profile: Profile, wish: list[Decision], *, is_recorded: bool) -> TimedSteps:
    instructions = msgspec.structs.replace(instructions_for(profile, wish), record_from_start=is_recorded)
    policy = partial(Follow, IndexedPlan.of(instructions), SwapEach(at_once=True))
    return TimedSteps(context, policy)


def _quickest(steps: TimedSteps) -> _Thread:
    """The least of each, but for the first step."""
    hooks = steps.in_hooks or [HookSeconds() for _ in steps.launching_s]
    seconds = [
        _Thread(step[Phase.FORWARD] + one.pack_s, step[Phase.BACKWARD] + one.unpack_s)
        for step, one in zip(steps.launching_s, hooks, strict=True)
    ]
    return _Thread(*map(min, zip(*seconds[1:], strict=True)))
