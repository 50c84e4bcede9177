"""Study: the steps of one kind from the first to a profile, in a running loop or of a step function. It is a generator
that asks for one step after another: CAPTURE (1), TIME (whole, then op by op), VERIFY.

Steps of a step function may be repeated. So they are timed without hooks and from an arena, and the study finds out
whether recording changes bits.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from statistics import median
from typing import Any, Literal, NamedTuple

import msgspec

from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.profile import Link, Memory, Phase, Profile
from poochplan.formats.queries import saved_values
from poochplan.planner.arena.packing import packed
from poochplan.planner.whatif import with_bytes_beside
from poochplan.profiler.assembly.assemble import SWAPPED
from poochplan.profiler.assembly.reconcile import (
    Floats,
    PhaseSeconds,
    contradicted,
    is_doubted,
    steady,
    typical_phases,
)
from poochplan.profiler.assembly.values import UNWRITTEN
from poochplan.profiler.capture.capture import Capture, collected_after
from poochplan.profiler.capture.timing import OpRuns
from poochplan.profiler.step.preserve import preserved
from poochplan.profiler.trials.compare import RECORDED, instructions_for, verification, without_replays
from poochplan.profiler.trials.handle_cost import keeping
from poochplan.runtime.arena.known_steps import RepeatedStep
from poochplan.runtime.step_policies.follow import Course, Follow
from poochplan.runtime.step_policies.step_policy import StepPolicy, SwapEach
from poochplan.tensors.host_memory import is_freed_memory_given_back, new_memory_holds, page_fault_s

from .after_capture import HookSeconds, Keeping, OpTiming, PhaseTiming, Summing, Verifying
from .capturing import Capturing
from .watch import NewWatch, Scene, Studied

TIMED = 3
"""Number of a loop's segments that are timed whole, and again op by op."""
KEPT_STEPS = 2
"""Number of steps of a step function that keep every value under the engine, to measure the time of its hooks."""
LIVE = "profiled inside a running training loop"
HURRIED = "its inputs did not come again: times are of one captured step, and no replay was tried, so none is planned"
NO_ROOM = "the budget leaves no room to compare values with their replays: no replay was tried, so none is planned"


KeepAll = Callable[[], Instructions | None]
"""Returns the instructions of a step that is about to begin; None if it must swap."""


class Hurry(Exception):  # noqa: N818 - a word to the study
    """No further segments of this kind will come: the study must finish with the facts that it has."""


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """The options of a study."""

    link: Callable[[], Link]
    """Called once."""
    fits: Callable[[Profile], bool]
    """Whether the step may run in-core, judged by a profile without times; otherwise every step swaps."""
    room: Callable[[Profile], float] = lambda _: math.inf
    """Most bytes that a step may take. If that leaves no room for comparisons, no replay is tried and none is
    planned.
    """
    with_costs: Callable[[Profile, Sequence[HookSeconds]], Profile]
    """Adds the runtime's costs to the profile; the given steps kept every value."""
    workload: str = ""
    timed: int = TIMED
    notes: Sequence[str] = (LIVE,)
    plain_s: float | None = None
    """Seconds of a step by PyTorch alone, if that was timed before."""
    say: Callable[[str], None] = lambda _: None
    """Called with a line of text at each stage."""


class Timed(NamedTuple):
    """The results of the timed steps."""

    steps: list[PhaseSeconds]
    """The steps to whose seconds the ops' seconds are to add up."""
    runs: Floats | None
    """Seconds of each op, (steps, ops); None if no step matched the captured one."""
    notes: list[str]
    unserved_s: float | None
    """The step with the ordinary allocator, if ``steps`` are as if served from an arena."""
    plain_s: float
    """The median step with the ordinary allocator, or as it was timed."""


def study(scene: Scene, options: StudyOptions) -> Studied:
    """Asks for watches, receives each back when its step has a result, and returns the profile."""
    options.say("capturing one step")
    seen: Capturing = yield lambda: Capturing(scene)
    options.say("measuring the link")
    draft = partial(seen.draft, link=options.link(), workload=options.workload)
    captured_s, plain_s = seen.capture.durations(), options.plain_s
    keep_all = _keep_all(seen, draft("run", captured_s, [dict.fromkeys(Phase, 0.0)], []), options.fits)
    mode: Literal["run", "swap-all"] = "swap-all" if keep_all() is None else "run"
    in_hooks: list[HookSeconds] = []
    try:
        is_plain = not is_freed_memory_given_back()  # no setting of a session is in force yet
        timed = yield from _timed(scene, options, seen.capture, keep_all, in_hooks)
        notes = [*options.notes, *timed.notes, *([SWAPPED] if mode == "swap-all" else [])]
        if is_plain and len(in_hooks) == TIMED:  # without their time in hooks, this is PyTorch's own time
            plain_s = timed.plain_s
        profile = draft(mode, captured_s if timed.runs is None else timed.runs, timed.steps, notes)
        times = msgspec.structs.replace(profile.times, plain_step_s=plain_s, unserved_step_s=timed.unserved_s)
        profile = msgspec.structs.replace(profile, times=times)
        options.say("verifying replays")
        profile = yield from _verified(scene, profile, options.room(profile) - max(0, seen.grown_bytes()))
        if scene.is_repeated and mode == "run":
            profile = yield from _kept(scene, profile, timed.steps, in_hooks)
    except Hurry:
        once = {phase: sum(op.duration_s for op in seen.capture.ops if op.phase is phase) for phase in Phase}
        profile = without_replays(draft("swap-all", captured_s, [once], [*options.notes, HURRIED]))
    return options.with_costs(profile, in_hooks if mode == "run" else [])


def _keep_all(seen: Capturing, in_core: Profile, fits: Callable[[Profile], bool]) -> KeepAll:
    """A function that returns the instructions to keep all values in a step that is about to begin; None if it must
    swap.
    """
    keeps, twice = keeping(in_core), with_bytes_beside(in_core, in_core.in_core_peak_bytes)

    def keep_all() -> Instructions | None:
        if fits(twice):  # fits after any likely growth: a census takes as long as some steps
            return keeps
        more_bytes = seen.grown_bytes()
        return keeps if fits(with_bytes_beside(in_core, more_bytes) if more_bytes > 0 else in_core) else None

    return keep_all


# -- TIME ------------------------------------------------------------------------------------------------------------


def _timed(
    scene: Scene, options: StudyOptions, capture: Capture, keep_all: KeepAll, in_hooks: list[HookSeconds]
) -> Generator[NewWatch, Any, Timed]:
    """Times the segments of a loop, under hooks whose time is subtracted; ``in_hooks`` gets the time of steps that keep
    all values.

    A repeatable step runs as planned steps do: on the CPU from one arena, if it can be laid out. Otherwise the seconds
    of ops would include fresh pages of memory. In a loop these are counted, and their seconds subtracted.
    """
    arena: RepeatedStep | None = None

    def policy() -> StepPolicy | None:
        keeps = keep_all()
        if keeps is None:
            return SwapEach(at_once=True)
        return None if scene.is_repeated else Keeping(keeps)

    faults: list[PhaseSeconds] = []

    def several(count: int) -> Generator[NewWatch, Any, list[PhaseSeconds]]:
        seconds = []
        for _ in range(count):
            watch: PhaseTiming = yield lambda: PhaseTiming(scene, policy(), arena)
            seconds.append(watch.seconds)
            faults.append({phase: float(count) for phase, count in watch.faults.items()})
            in_hooks.extend([watch.in_hooks] if isinstance(watch.policy, Keeping) else [])
        return seconds

    options.say(f"timing {options.timed} steps")
    with collected_after(capture) if scene.is_repeated else contextlib.nullcontext():
        steps = yield from several(1)
    with contextlib.ExitStack() as stack:
        unserved_s = None
        if scene.is_repeated and scene.where.type == "cpu" and capture.memory is Memory.ALLOCATED:
            arena = stack.enter_context(contextlib.closing(RepeatedStep(packed)))
            steps += yield from several(1)  # ordinary, and logged
            for _ in range(2):  # one that touches the pages; another if it differs from the log
                yield from several(0 if arena.is_served else 1)
            if arena.is_served:
                steps, unserved_s = [], min(sum(step.values()) for step in steps)
            else:
                arena.close()
                arena = None
        steps += yield from several(options.timed - len(steps))
        options.say(f"timing {len(capture.ops)} ops over {options.timed} steps")
        ops = OpRuns(capture.ops)
        for _ in range(options.timed):
            watch: OpTiming = yield lambda: OpTiming(scene, policy(), arena)
            ops.add(watch.timer, watch.seconds)
        notes = ops.notes
        if scene.is_repeated and not notes and is_doubted(steps, ops.steps):  # steps that differ may take other times
            options.say(f"timed steps spread too much; timing {options.timed} more")
            steps, notes = steady(steps, (yield from several(options.timed)), ops.steps)
    plain_s = median(sum(step.values()) for step in steps)
    if not scene.is_repeated and scene.where.type == "cpu" and capture.memory is Memory.ALLOCATED:
        unserved_s = sum(typical_phases(steps).values())
        fresh_s = {phase: count * page_fault_s() for phase, count in typical_phases(faults).items()}
        steps = [_without(step, fresh_s) for step in steps]
    return Timed(steps, ops.seconds, notes, unserved_s, plain_s)


def _without(seconds: PhaseSeconds, fresh_s: PhaseSeconds) -> PhaseSeconds:
    """The step without the seconds that fresh pages take: an arena keeps its pages. If they seem to be more than half
    of a phase, the machine was busy when a page fault was timed.
    """
    return {phase: max(phase_s / 2, phase_s - fresh_s[phase]) for phase, phase_s in seconds.items()}


def _kept(scene: Scene, profile: Profile, timed: list[PhaseSeconds], in_hooks: list[HookSeconds]) -> Studied:
    """Steps that keep every value under the engine; ``in_hooks`` gets the time of their hooks. If they contradict the
    ``timed`` ones, the profile gets a note and a warning is given.
    """
    seconds = []
    for _ in range(KEPT_STEPS):
        watch: PhaseTiming = yield lambda: PhaseTiming(scene, Keeping(keeping(profile)))
        seconds.append(watch.seconds)
        in_hooks.extend([] if watch.why_not else [watch.in_hooks])
    note = contradicted(timed, seconds)
    if not note:
        return profile
    warnings.warn(f"poochplan: {note}", UserWarning, stacklevel=2)
    return msgspec.structs.replace(profile, notes=(*profile.notes, note))


# -- VERIFY ----------------------------------------------------------------------------------------------------------


def _verified(scene: Scene, profile: Profile, room_bytes: float) -> Studied:
    """The profile with ``unreplayable`` set on every value whose replay was tried and failed.

    Replays are compared with the tensors saved in a recorded step. For a repeatable step, these are also compared with
    the tensors of a step without any mode. If they differ nothing is recomputed, because recording alone would change
    bits.
    """
    replay_bytes = _replay_bytes(profile)
    is_tight = profile.mode == "swap-all" or profile.in_core_peak_bytes + replay_bytes > room_bytes
    if is_tight and room_bytes < math.inf and _smallest_bytes(profile) + replay_bytes > room_bytes:
        return without_replays(msgspec.structs.replace(profile, notes=(*profile.notes, NO_ROOM)))
    unwritten, first, other = None, list[int](), list[int]()
    if scene.is_repeated:
        unwritten = _unwritten(profile)
        first, other = yield from _sums(scene, profile, unwritten)
    trials = verification(profile, is_tight=is_tight)
    trial = next(trials)
    while True:
        watch: Verifying = yield partial(Verifying, scene, trial, unwritten)
        if other and any(a == b != c for a, b, c in zip_longest(first, other, watch.sums)):
            return without_replays(profile, RECORDED)
        unwritten, other = None, []  # one step is enough
        try:
            trial = trials.send(watch.verify)
        except StopIteration as verified:
            return verified.value


def _replay_bytes(profile: Profile) -> int:
    """About how many bytes more a step takes that compares values with their replays: two of the largest."""
    return 2 * max((profile.rounded_bytes(profile.values[one].size_bytes) for one in saved_values(profile)), default=0)


def _smallest_bytes(profile: Profile) -> int:
    """Bytes of a step that swaps."""
    from poochplan.planner.planning import smallest_budget  # here, because most steps have room

    return smallest_budget(profile)


def _unwritten(profile: Profile) -> frozenset[int]:
    """Save points of the values that a kernel leaves partly unwritten."""
    saved = saved_values(profile)
    return frozenset(at for at, one in enumerate(saved) if profile.values[one].unreplayable.endswith(UNWRITTEN))


def _sums(
    scene: Scene, profile: Profile, unwritten: frozenset[int]
) -> Generator[NewWatch, Any, tuple[list[int], list[int]]]:
    """Sums of the tensors saved in two steps without any mode. The second is left out if the step does not repeat
    itself, since then it says nothing about recording.

    Memory that a kernel leaves unwritten keeps its old contents. So the two steps get memory with different bytes, and
    places that differ between them are not compared.
    """
    rest = Decision.SWAP if profile.mode == "swap-all" else Decision.KEEP  # memory is nearly what verification takes
    every = [Decision.KEEP if profile.values[one].pinned else rest for one in saved_values(profile)]
    course = Course.of(msgspec.structs.replace(instructions_for(profile, every), record_from_start=False))

    def plain(byte: int) -> Generator[NewWatch, Any, list[int]]:
        with preserved(scene.model, next(iter(scene.optimizers), None)), new_memory_holds(byte):
            watch: Summing = yield lambda: Summing(scene, Follow(course, SwapEach()), unwritten)
        return watch.sums

    first, again = (yield from plain(0)), (yield from plain(0))
    return first, (yield from plain(1)) if first == again else []
