"""The step's seconds: by PyTorch alone, as planned steps run, and op by op."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import msgspec
import torch

from poochplan.formats.profile import Memory, Profile
from poochplan.planner.arena.packing import packed
from poochplan.profiler.assembly.reconcile import Floats, PhaseSeconds
from poochplan.profiler.assembly.steadiness import JUDGED_S, MUCH, steady
from poochplan.profiler.capture.capture import Capture
from poochplan.profiler.capture.garbage import collected_after
from poochplan.profiler.capture.timing import time_ops
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
    return median(sum(step.values()) for step in _steps(runner, options.iterations))


def timed_steps(runner: Runner, capture: Capture, where: torch.device, options: Options) -> Timed:
    """Times the step as planned steps run: on the CPU from one arena, where it can be laid out, for else the pages of
    fresh memory would be in the seconds of ops; in-core or swapping, as the runner does it.
    """
    try:
        return _timed(runner, capture, where, options)
    finally:
        if runner.arena is not None:
            runner.arena.close()
            runner.arena = None


def _timed(runner: Runner, capture: Capture, where: torch.device, options: Options) -> Timed:
    options.say(f"timing {options.iterations} steps")
    with collected_after(capture):
        unserved = [runner.one_step()]
    is_served = where.type == "cpu" and capture.memory is Memory.ALLOCATED and _is_served_now(runner, unserved)
    steps = [] if is_served else unserved
    steps += _steps(runner, options.iterations - len(steps))
    options.say(f"timing {len(capture.ops)} ops over {options.iterations} steps")
    times = time_ops(runner.model, where, runner.one_step, capture.ops, options.iterations)
    notes = [times.note] if times.note else []
    if not times.note:  # steps that differ may well take different times
        judged = steady(steps, times.steps, lambda: _timed_again(runner, options))
        notes = judged.notes
        steps[:] = judged.steps
    return Timed(steps, unserved, times.runs if times.runs is not None else capture.durations(), notes)


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


def _is_served_now(runner: Runner, unserved: list[PhaseSeconds]) -> bool:
    """Has the runner's steps served from an arena, by one that is ordinary and written down, and one that touches its
    pages; False where a step goes on to differ from those it was laid out by.
    """
    runner.arena = RepeatedStep(packed)
    unserved.append(runner.one_step())
    for _ in range(2):
        runner.one_step()
        if runner.arena.is_served:
            return True
    runner.arena.close()
    runner.arena = None
    return False


def _steps(runner: Runner, count: int) -> list[PhaseSeconds]:
    return [runner.one_step() for _ in range(count)]


def _timed_again(runner: Runner, options: Options) -> list[PhaseSeconds]:
    options.say(f"timed steps spread too much; timing {options.iterations} more")
    return _steps(runner, options.iterations)
