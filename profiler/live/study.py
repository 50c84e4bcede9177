"""Study: the steps of one kind from the first to a profile, in a running loop or of a step function. It is a generator
that asks for one step after another: CAPTURE (1), TIME (whole, then op by op), VERIFY.

Steps of a step function may be repeated. So they are timed without hooks and from an arena, and the study finds out
whether recording changes bits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from statistics import median
from typing import Any, Literal, NamedTuple

import msgspec

from poochplan.formats.occupancy import Floats
from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.profile import Link, Memory, Phase, Profile
from poochplan.formats.queries import saved_values
from poochplan.planner.whatif import with_bytes_beside
from poochplan.profiler.assembly.assemble import SWAPPED, UNWRITTEN
from poochplan.profiler.assembly.reconcile import PhaseSeconds, contradicted, is_doubted, steady
from poochplan.profiler.capture.capture import Capture, collected_after
from poochplan.profiler.step.preserve import preserved
from poochplan.profiler.trials.compare import RECORDED, instructions_for, keeping, verification, without_replays
from poochplan.runtime.messages import warn
from poochplan.runtime.replays.compiled_tape import serves
from poochplan.runtime.step_policies.follow import Follow, IndexedPlan
from poochplan.runtime.step_policies.step_policy import StepPolicy, SwapEach
from poochplan.tensors.host_memory import is_freed_memory_given_back, new_memory_holds
from poochplan.units import counted

from .after_capture import HookSeconds, OpRuns, Summing, TimedSteps, Verifying
from .capturing import Capturing
from .launch_costs import launch_costs, phase_launches
from .own_costs import Own, own_costs, with_own_costs
from .segment_observer import NewObserver, Studied, StudyContext

TIMED = 3
"""Number of a loop's segments that are timed whole, and again op by op."""
LOOP_FROM_ARENA = 2
"""Number of a loop's segments that are timed whole with their blocks in an arena."""
KEPT_STEPS = 2
"""Number of steps of a step function that keep every value under the engine, to measure the time of its hooks."""
LIVE = "profiled inside a running training loop"
HURRIED = "its inputs did not come again: times are of one captured step, and no replay was tried, so none is planned"
NO_ROOM = "the budget leaves no room to compare values with their replays: no replay was tried, so none is planned"


NewPolicy = Callable[[], StepPolicy | None]


class NoMoreSegments(Exception):  # noqa: N818 - a word to the study
    """No further segments of this kind will come: the study must finish with the facts that it has."""


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    link: Callable[[], Link]
    """Called once."""
    fits: Callable[[Profile], bool]
    """Whether the step may run in-core, judged by a profile without times; otherwise every step swaps."""
    room: Callable[[Profile], float] = lambda _: math.inf
    """Most bytes that a step may take. If that leaves no room for comparisons, no replay is tried or planned."""
    has_arena: Callable[[], bool] = lambda: True
    """Whether steps may be timed from an arena, which holds its memory between them."""
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
    steps: list[PhaseSeconds]
    """The steps to whose seconds the ops' seconds are to add up."""
    runs: Floats | None
    """Seconds of each op, (steps, ops); None if no step matched the captured one."""
    notes: list[str]
    unserved_s: float | None
    """The step with the ordinary allocator, if ``steps`` are as if from an arena."""
    plain_s: float | None
    """The median step with the ordinary allocator in a loop, without its hooks; None if not all of them kept every
    value."""


def study(context: StudyContext, options: StudyOptions) -> Studied:
    """Asks for observers, receives each back when its step has a result, and returns the profile."""
    options.say("capturing one step")
    seen: Capturing = yield lambda: Capturing(context)
    if context.is_repeated and seen.lives_on:
        options.say("capturing the next step: it begins with what this one has left")
        seen = yield partial(Capturing, context, before=seen.capture)
    seen.capture.left_over = seen.capture.lifetimes.held()  # the next step is about to begin
    options.say("measuring the link")
    draft = partial(seen.draft, link=options.link(), workload=options.workload)
    captured_s, plain_s = seen.capture.durations(), options.plain_s
    in_core = draft("run", captured_s, [dict.fromkeys(Phase, 0.0)], [])
    twice = with_bytes_beside(in_core, in_core.in_core_peak_bytes)
    has_room = partial(options.fits, twice)
    policy = _policies(seen, in_core, options.fits, has_room)
    mode: Literal["run", "swap-all"] = "swap-all" if isinstance(policy(), SwapEach) else "run"
    steps, own, is_ahead = TimedSteps(context, policy), Own(), context.where.type != "cpu"
    try:
        is_plain = not is_freed_memory_given_back()  # no setting of a session is in force yet
        timed = yield from _timed(options, seen.capture, steps, has_room)
        notes = [*options.notes, *timed.notes, *([SWAPPED] if mode == "swap-all" else [])]
        if is_plain and timed.plain_s is not None:  # without their time in hooks, this is PyTorch's own time
            plain_s = timed.plain_s
        profile = draft(mode, captured_s if timed.runs is None else timed.runs, timed.steps, notes)
        times = msgspec.structs.replace(profile.times, plain_step_s=plain_s, unserved_step_s=timed.unserved_s)
        profile = msgspec.structs.replace(profile, times=times)
        if mode == "run" and is_ahead:
            own = {"phase_launch_s": phase_launches(profile, steps.launching_s)}
        options.say("verifying replays")
        profile = yield from _verified(context, profile, options.room(profile) - max(0, seen.grown_bytes()))
        if context.is_repeated and mode == "run":
            profile = yield from _kept(context, profile, timed.steps, steps.in_hooks)
            if is_ahead:
                own |= yield from launch_costs(context, profile)
            else:
                own = yield from own_costs(context, profile, has_arena=timed.unserved_s is not None)
    except NoMoreSegments:
        once = {phase: sum(op.duration_s for op in seen.capture.ops if op.phase is phase) for phase in Phase}
        profile = without_replays(draft("swap-all", captured_s, [once], [*options.notes, HURRIED]))
    profile = options.with_costs(profile, steps.in_hooks if mode == "run" else [])
    return with_own_costs(profile, own)


def _policies(
    seen: Capturing, in_core: Profile, fits: Callable[[Profile], bool], has_room: Callable[[], bool]
) -> NewPolicy:
    """A function: the policy of a step that is about to begin. It keeps all values, or must swap."""
    keeps = keeping(in_core)

    def policy() -> StepPolicy | None:
        is_kept = has_room()  # it fits after any likely growth: a census takes as long as some steps
        if not is_kept:
            more_bytes = seen.grown_bytes()
            is_kept = fits(with_bytes_beside(in_core, more_bytes) if more_bytes > 0 else in_core)
        if not is_kept:
            return SwapEach(at_once=True)
        return None if seen.context.is_repeated else _keeping_policy(keeps)

    return policy


def _keeping_policy(keeps: Instructions) -> Follow:
    return Follow(IndexedPlan.of(keeps), SwapEach(at_once=True))


# -- TIME ------------------------------------------------------------------------------------------------------------


def _timed(
    options: StudyOptions, capture: Capture, steps: TimedSteps, has_room: Callable[[], bool]
) -> Generator[NewObserver, Any, Timed]:
    """Times steps, those of a loop under hooks whose time is subtracted.

    They run as planned steps do: on the CPU from one arena, if it can be laid out and there is room for it beside an
    ordinary step. Otherwise the seconds of ops include fresh pages of memory: these are counted, and their seconds
    subtracted.
    """
    is_repeated, count = steps.context.is_repeated, options.timed
    options.say(f"timing {counted(count, 'step')}")
    with collected_after(capture) if is_repeated else contextlib.nullcontext():
        ordinary = yield from steps.several(1)
    is_allocated = steps.context.where.type == "cpu" and capture.workspace.memory is Memory.ALLOCATED
    from_arena: list[PhaseSeconds] = []
    with contextlib.closing(steps):
        if is_allocated and options.has_arena() and (is_repeated or has_room()):
            ordinary += yield from steps.several(0 if is_repeated else count - 2)
            ordinary += yield from steps.recorded()
        if steps.arena is not None:
            from_arena = yield from steps.several(count if is_repeated else LOOP_FROM_ARENA)
        else:
            ordinary += yield from steps.several(count - len(ordinary))
        timed, has_kept = from_arena or ordinary, steps.have_followed
        if not has_room():
            steps.close()  # ops that are timed one by one may take blocks beside an arena
        options.say(f"timing {len(capture.ops)} ops over {counted(count, 'step')}")
        ops = OpRuns(capture.ops)
        yield from steps.by_op(count, ops)
        notes = ops.notes
        is_alike = is_repeated and not notes and (steps.arena is not None or not from_arena)
        if is_alike and is_doubted(timed, ops.steps):  # steps that differ may take other times
            options.say(f"timed steps spread too much; timing {count} more")
            timed, notes = steady(timed, (yield from steps.several(count)), ops.steps)
    whole_s = [sum(step.values()) for step in ordinary]
    plain_s, unserved_s = median(whole_s) if has_kept else None, min(whole_s) if from_arena else None
    if is_allocated and not (is_repeated and from_arena):
        timed, unserved_s = from_arena or steps.without_faults(timed), median(whole_s)
    return Timed(timed, ops.seconds, notes, unserved_s, plain_s)


def _kept(context: StudyContext, profile: Profile, timed: list[PhaseSeconds], in_hooks: list[HookSeconds]) -> Studied:
    """Steps that keep every value under the engine; ``in_hooks`` gets the time of their hooks. If they contradict the
    ``timed`` ones, the profile gets a note and a warning is given.
    """
    steps = TimedSteps(context, lambda: _keeping_policy(keeping(profile)))
    seconds = yield from steps.several(KEPT_STEPS)
    in_hooks += steps.in_hooks
    note = contradicted(timed, seconds)
    if not note:
        return profile
    warn(note, UserWarning)
    return msgspec.structs.replace(profile, notes=(*profile.notes, note))


# -- VERIFY ----------------------------------------------------------------------------------------------------------


def _verified(context: StudyContext, profile: Profile, room_bytes: float) -> Studied:
    """The profile with ``unreplayable`` set on every value whose replay was tried and failed.

    Replays are compared with the tensors saved in a recorded step. For a repeatable step, these are also compared with
    the tensors of a step without any mode, and so are those of a step below the mode by which Python's tape records. If
    they differ nothing is recomputed: recording alone would change bits.
    """
    largest_bytes = max((profile.rounded_bytes(profile.values[x].size_bytes) for x in saved_values(profile)), default=0)
    replay_bytes = 2 * largest_bytes  # about that much more a step takes that compares values with their replays
    is_tight = profile.mode == "swap-all" or profile.in_core_peak_bytes + replay_bytes > room_bytes
    if is_tight and room_bytes < math.inf:
        from poochplan.planner.planning import smallest_budget  # here, because most steps have room

        if smallest_budget(profile) + replay_bytes > room_bytes:
            return without_replays(msgspec.structs.replace(profile, notes=(*profile.notes, NO_ROOM)))
    unwritten, first, other, watched = None, list[int](), list[int](), list[list[int]]()
    if context.is_repeated:
        saved = enumerate(saved_values(profile))  # the save points of values that a kernel leaves partly unwritten
        unwritten = frozenset(at for at, one in saved if profile.values[one].unreplayable.endswith(UNWRITTEN))
        first, other, watched = yield from _sums(context, profile, unwritten)
    trials = verification(profile, is_tight=is_tight)
    trial = next(trials)
    while True:
        observer: Verifying = yield partial(Verifying, context, trial, unwritten)
        for sums in (observer.sums, *watched):
            if other and any(a == b != c for a, b, c in zip_longest(first, other, sums)):
                return without_replays(profile, RECORDED)
        unwritten, other = None, []  # one step is enough
        try:
            trial = trials.send(observer.verify)
        except StopIteration as verified:
            return verified.value


def _sums(
    context: StudyContext, profile: Profile, unwritten: frozenset[int]
) -> Generator[NewObserver, Any, tuple[list[int], list[int], list[list[int]]]]:
    """Sums of the tensors saved in two steps without any mode, and in one below that of Python's tape, unless that tape
    serves here. The second and third are left out if the step does not repeat itself, since then it says nothing about
    recording.

    Memory that a kernel leaves unwritten keeps its old contents. So the two steps get memory with different bytes, and
    places that differ between them are not compared.
    """
    rest = Decision.SWAP if profile.mode == "swap-all" else Decision.KEEP  # memory is nearly what verification takes
    every = [Decision.KEEP if profile.values[one].pinned else rest for one in saved_values(profile)]
    indexed = IndexedPlan.of(msgspec.structs.replace(instructions_for(profile, every), record_from_start=False))

    def step(byte: int, *, is_watched: bool = False) -> Generator[NewObserver, Any, list[int]]:
        policy = Follow(indexed, SwapEach())
        with preserved(context.model, next(iter(context.optimizers), None)), new_memory_holds(byte):
            observer: Summing = yield lambda: Summing(context, policy, unwritten, is_watched=is_watched)
        return observer.sums

    first, again = (yield from step(0)), (yield from step(0))
    if first != again:
        return first, [], []
    other = yield from step(1)
    return first, other, [(yield from step(0, is_watched=True))] if serves(context.where.type) else []
