"""The step's seconds: by PyTorch alone, as planned steps run, and op by op."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import msgspec

from poochplan.formats.profile import Memory, Profile
from poochplan.planner.arena.packing import packed
from poochplan.profiler.assembly.reconcile import JUDGED_S, MUCH, Floats, PhaseSeconds, steady
from poochplan.profiler.capture.capture import Capture, collected_after
from poochplan.profiler.capture.timing import OpRuns
from poochplan.profiler.live.after_capture import OpTiming, TimingWatch
from poochplan.profiler.live.step_function import StepFunction
from poochplan.runtime.arena.repeated_step import RepeatedStep

from .real import Runner
from .request import Options


class Timed(NamedTuple):
    """What the timed steps say."""

    steps: list[PhaseSeconds]
    """Those that the ops' seconds are to add up to."""
    unserved: list[PhaseSeconds]
    """Those of the ordinary allocator; the same ones where none was served."""
    runs: Floats
    """Seconds of each op, (steps, ops)."""
    notes: list[str]

    @property
    def unserved_step_s(self) -> float | None:
        """The shortest step of the ordinary allocator, where the others were served: the first of them is cold."""
        return None if self.steps is self.unserved else min(sum(step.values()) for step in self.unserved)


def plain_step_s(runner: Runner, options: Options) -> float:
    """The median step by PyTorch alone; nothing of a session is set yet. The steps before them warm up."""
    options.say(f"warming up ({options.warmup} steps), and timing {options.iterations} by PyTorch alone")
    for _ in range(options.warmup):
        runner.one_step()
    return median(sum(runner.one_step().values()) for _ in range(options.iterations))


def timed_steps(steps: StepFunction, capture: Capture, options: Options, *, moves: bool) -> Timed:
    """Times the step as planned steps run: on the CPU from one arena, where it can be laid out, for else the pages of
    fresh memory would be in the seconds of ops; in-core, or swapping where it ``moves`` what is saved.
    """
    runner, scene = steps.runner, steps.scene

    def one_step() -> PhaseSeconds:
        return steps.run(TimingWatch(scene, None)).seconds if moves else runner.one_step()

    def several(count: int) -> list[PhaseSeconds]:
        return [one_step() for _ in range(count)]

    def again() -> list[PhaseSeconds]:
        options.say(f"timed steps spread too much; timing {options.iterations} more")
        return several(options.iterations)

    options.say(f"timing {options.iterations} steps")
    try:
        with collected_after(capture):
            unserved = [one_step()]
        is_cpu = scene.where.type == "cpu"
        is_served = is_cpu and capture.memory is Memory.ALLOCATED and _is_served_now(runner, one_step, unserved)
        timed = [] if is_served else unserved
        timed += several(options.iterations - len(timed))
        options.say(f"timing {len(capture.ops)} ops over {options.iterations} steps")
        runs = OpRuns(capture.ops)
        for _ in range(options.iterations):
            watch = steps.run(OpTiming(scene, None), moves=moves)
            runs.add(watch.timer, watch.seconds)
        times = runs.times()
        notes = [times.note] if times.note else []
        if not times.note:  # steps that differ may well take different times
            judged = steady(timed, times.steps, again)
            notes = judged.notes
            timed[:] = judged.steps
    finally:
        if runner.arena is not None:
            runner.arena.close()
            runner.arena = None
    return Timed(timed, unserved, times.runs if times.runs is not None else capture.durations(), notes)


def with_seconds_beside(profile: Profile, plain_s: float | None, timed: Timed) -> Profile:
    """The profile with what the same step takes elsewhere."""
    times = msgspec.structs.replace(profile.times, plain_step_s=plain_s, unserved_step_s=timed.unserved_step_s)
    return msgspec.structs.replace(profile, times=times)


def with_plain_again(profile: Profile, again: Callable[[], float]) -> Profile:
    """The profile, its step by PyTorch alone timed ``again`` where it took more than half longer than in the session's
    memory: the shorter of both counts, for a busy machine makes no step shorter.
    """
    times = profile.times
    beside_s = times.step_s if times.unserved_step_s is None else times.unserved_step_s
    if times.plain_step_s is None or times.plain_step_s <= max(JUDGED_S, (1 + MUCH) * beside_s):
        return profile
    times = msgspec.structs.replace(times, plain_step_s=min(times.plain_step_s, again()))
    return msgspec.structs.replace(profile, times=times)


def _is_served_now(runner: Runner, one_step: Callable[[], PhaseSeconds], unserved: list[PhaseSeconds]) -> bool:
    """Has the runner's steps served from an arena, by one that is ordinary and written down, and one that touches its
    pages; False where a step goes on to differ from those it was laid out by.
    """
    runner.arena = RepeatedStep(packed)
    unserved.append(one_step())
    for _ in range(2):
        one_step()
        if runner.arena.is_served:
            return True
    runner.arena.close()
    runner.arena = None
    return False
