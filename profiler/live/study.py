"""Study: what is done with the segments of one kind until there is a profile of them, as a generator that asks for one
after another: CAPTURE (1), TIME (whole, then op by op), VERIFY (1 or 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, Literal, TypeVar

import msgspec
import torch

from poochplan.formats.plan import Instructions
from poochplan.formats.profile import Link, Phase, Profile
from poochplan.formats.queries import saved_values
from poochplan.planner.whatif import with_bytes_beside
from poochplan.profiler.assembly.assemble import (
    SWAPPED,
    assemble,
    capture_notes,
    garbage_notes,
    kept_notes,
    model_notes,
    this_machine,
)
from poochplan.profiler.assembly.reconcile import Floats, PhaseSeconds
from poochplan.profiler.capture.captured import CapturedOp
from poochplan.profiler.capture.clock import library_bytes
from poochplan.profiler.capture.timing import OpRuns
from poochplan.profiler.trials.compare import verification, without_replays
from poochplan.profiler.trials.handle_cost import HookSeconds, keeping, with_handles
from poochplan.profiler.trials.machine_facts import cached_cost, with_known_cost
from poochplan.runtime.watch.census import census_bytes
from poochplan.tensors.host_memory import is_freed_memory_given_back

from .after_capture import Keeping, OpTiming, PhaseTiming, Verifying
from .capturing import Capturing
from .watch import Scene, Watch

TIMED = 3
"""Segments that are timed whole, and as many op by op."""
LIVE = "profiled inside a running training loop"
HURRIED = "its inputs did not come again: times are of one captured step, and no replay was tried, so none is planned"


NO_ROOM = "the budget leaves no room to compare values with their replays: no replay was tried, so none is planned"
T = TypeVar("T")


class Hurry(Exception):  # noqa: N818 - a word to the study
    """No more segments of this kind come: it is to make do with what it knows."""


NewWatch = Callable[[], Watch]
Keep = Callable[[], Instructions | None]
"""What keeps all in a segment that is about to begin; None where it has to swap."""
Studied = Generator[NewWatch, Any, Profile]


def study(
    scene: Scene,
    link: Callable[[], Link],
    fits: Callable[[Profile], bool],
    workload: str,
    room: Callable[[Profile], float] = lambda _: math.inf,
) -> Studied:
    """Asks for watches, is sent each back when its segment has told something, and gives the profile.

    ``fits``: whether the step may run in-core, by a profile without times; otherwise every segment swaps. ``room``:
    most bytes that a segment may take; where it leaves none to compare in, no replay is tried and none is planned.
    """
    seen: Capturing = yield lambda: Capturing(scene)
    draft = drafts(seen, aside(link), workload)
    durations = seen.capture.durations()
    in_core = draft("run", durations, [dict.fromkeys(Phase, 0.0)], [])

    def grown_bytes() -> int:
        """What lives beside the step by now, or will one day, and did not when it was captured."""
        return max(seen.foreseen_bytes, census_bytes(scene.where.type) - (seen.base_bytes or 0))

    keeps, twice = keeping(in_core), with_bytes_beside(in_core, in_core.in_core_peak_bytes)

    def keep_all() -> Instructions | None:
        if fits(twice):  # whatever has grown meanwhile: a census takes as long as some steps
            return keeps
        more_bytes = grown_bytes()
        return keeps if fits(with_bytes_beside(in_core, more_bytes) if more_bytes > 0 else in_core) else None

    mode: Literal["run", "swap-all"] = "swap-all" if keep_all() is None else "run"
    notes = [*step_notes(seen), LIVE]
    in_hooks: list[HookSeconds] = []
    try:
        is_plain = not is_freed_memory_given_back()  # nothing of the session's own has been set yet
        measured, in_hooks = yield from _timed(scene, keep_all)
        runs, differing = yield from _timed_ops(scene, keep_all, seen.capture.ops)
        swapped = [SWAPPED] if mode == "swap-all" else []
        profile = draft(mode, durations if runs is None else runs, measured, [*notes, *differing, *swapped])
        if is_plain and len(in_hooks) == TIMED:
            profile = _with_plain_step(profile, measured)
        room_bytes, replay_bytes = room(profile) - max(0, grown_bytes()), _replay_bytes(profile)
        is_tight = mode == "swap-all" or profile.in_core_peak_bytes + replay_bytes > room_bytes
        if is_tight and _smallest_bytes(profile) + replay_bytes > room_bytes:
            profile = without_replays(msgspec.structs.replace(profile, notes=(*profile.notes, NO_ROOM)))
        else:
            profile = yield from _verified(scene, profile, is_tight=is_tight)
    except Hurry:
        once = {phase: _seconds_of(phase, seen.capture.ops) for phase in Phase}
        profile = without_replays(draft("swap-all", durations, [once], [*notes, HURRIED]))
    steps = in_hooks if mode == "run" else []
    if scene.measures_later:
        return with_known_cost(profile, scene.where, steps)
    return with_handles(profile, aside(lambda: cached_cost(scene.where)), steps)


def _with_plain_step(profile: Profile, measured: list[PhaseSeconds]) -> Profile:
    """The steps kept everything, and the time in hooks is taken off: so long PyTorch takes by itself."""
    plain_s = median(sum(step.values()) for step in measured)
    return msgspec.structs.replace(profile, times=msgspec.structs.replace(profile.times, plain_step_s=plain_s))


def _replay_bytes(profile: Profile) -> int:
    """About what a segment takes more that compares values with their replays: two of the largest."""
    return 2 * max((profile.rounded_bytes(profile.values[one].size_bytes) for one in saved_values(profile)), default=0)


def _smallest_bytes(profile: Profile) -> int:
    """What a segment takes that swaps."""
    from poochplan.planner.planning import smallest_budget  # here, for most steps have room

    return smallest_budget(profile)


def _seconds_of(phase: Phase, ops: list[CapturedOp]) -> float:
    return sum(op.duration_s for op in ops if op.phase is phase)


def _timed(scene: Scene, keep_all: Keep) -> Generator[NewWatch, Any, tuple[list[PhaseSeconds], list[HookSeconds]]]:
    measured, in_hooks = [], []
    for _ in range(TIMED):
        watch: PhaseTiming = yield lambda: PhaseTiming(scene, keep_all())
        measured.append(watch.seconds)
        in_hooks += [watch.in_hooks] if isinstance(watch.policy, Keeping) else []
    return measured, in_hooks


def _timed_ops(
    scene: Scene, keep_all: Keep, ops: list[CapturedOp]
) -> Generator[NewWatch, Any, tuple[Floats | None, list[str]]]:
    runs = OpRuns(ops)
    for _ in range(TIMED):
        watch: OpTiming = yield lambda: OpTiming(scene, keep_all())
        runs.add(watch.timer, watch.seconds)
    times = runs.times()
    return times.runs, [times.note] if times.note else []


def _verified(scene: Scene, profile: Profile, *, is_tight: bool) -> Studied:
    trials = verification(profile, is_tight=is_tight)
    trial = next(trials)
    while True:
        wanted = trial
        watch: Verifying = yield lambda wanted=wanted: Verifying(scene, wanted)  # type: ignore[misc]
        try:
            trial = trials.send(watch.verify)
        except StopIteration as verified:
            return verified.value


def drafts(
    seen: Capturing, link: Link, workload: str
) -> Callable[[Literal["run", "swap-all"], Floats, list[PhaseSeconds], list[str]], Profile]:
    """:func:`assemble` for the captured step, given mode, seconds of the ops, measured steps and notes."""
    scene = seen.scene
    held_bytes, machine = library_bytes(scene.where), this_machine(scene.where)

    def draft(
        mode: Literal["run", "swap-all"], runs: Floats, measured: list[PhaseSeconds], notes: list[str]
    ) -> Profile:
        return assemble(
            seen.capture,
            seen.kinds,
            runs,
            measured,
            model=scene.model,
            link=link,
            workload=workload,
            mode=mode,
            device=machine,
            notes=notes,
            accumulate=seen.has_gradients,
            held_bytes={"cublas": held_bytes, "beside": seen.beside_bytes},
        )

    return draft


def step_notes(seen: Capturing) -> list[str]:
    """What is to be said of the captured step, whatever it takes."""
    model, capture = seen.scene.model, seen.capture
    said = [*model_notes(model), *kept_notes(capture), *garbage_notes(capture, seen.kinds)]
    return [*said, *capture_notes(model, seen.scene.where)]


def aside(work: Callable[[], T]) -> T:
    """What it gives; the calling thread waits for it, and what it raises is raised here.

    Random numbers that it draws are none of the loop's: torch's generators are then as they were.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        torch.random.fork_rng(devices=gpus),
        ThreadPoolExecutor(1, thread_name_prefix="poochplan-aside") as pool,
    ):
        return pool.submit(work).result()
