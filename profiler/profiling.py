"""profile: runs a few training steps and returns what they do, measured."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from poochplan.errors import NativeError
from poochplan.formats.profile import Link, Memory, Phase, Profile
from poochplan.planner.arena.packing import packed
from poochplan.planner.simulator.evaluator import begin_build, library
from poochplan.profiler.assembly.assemble import EVAL_MODE, SWAPPED, runtime_notes
from poochplan.profiler.assembly.reconcile import JUDGED_S, MUCH, Floats, PhaseSeconds, contradicted, steady
from poochplan.profiler.capture.capture import Capture, collected_after
from poochplan.profiler.capture.clock import clock_of, current
from poochplan.profiler.capture.timing import OpRuns
from poochplan.profiler.fake.fake_profile import fake_profile, needed_without_memory
from poochplan.profiler.fake.roofline import parse_roofline
from poochplan.profiler.live.after_capture import OpTiming, TimingWatch, verify
from poochplan.profiler.live.capturing import Capturing
from poochplan.profiler.live.observer import profile_inside
from poochplan.profiler.live.step_function import StepFunction
from poochplan.profiler.live.study import drafts, step_notes
from poochplan.profiler.step.forward_only import check_real
from poochplan.profiler.step.preserve import preserved
from poochplan.profiler.trials.handle_cost import keeping, measured_on, runtime_cost, with_handles
from poochplan.runtime.allocator.library import build, fresh_memory
from poochplan.runtime.attachment import check_no_session
from poochplan.runtime.compiled.inductor import compiled_deferring
from poochplan.runtime.devices.cpu import choose_spill_dir
from poochplan.runtime.known_steps import RepeatedStep
from poochplan.runtime.metering.allocated import step_scope
from poochplan.tensors.host_memory import available_bytes, fitting_mode, memory_left
from poochplan.units import parse_rate

from .link import measure_link
from .real import Runner
from .request import Options, Progress, check_backward, check_mode, check_optimizer, checked_device, tensors_beside

RealMode = Literal["run", "swap-all"]
ITERATIONS = 5
KEPT_STEPS = 2
"""So many keep everything under the engine, which tells what its hooks take."""


def profile(
    step: Callable[[], Any],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    backward: Literal["outside", "inside"] = "outside",
    device: str | None = None,
    mode: Literal["run", "swap-all", "auto", "fake"] = "run",
    roofline: str | None = None,
    workload: str = "",
    iterations: int | None = None,
    warmup: int = 1,
    accumulate: bool = False,
    also: Sequence[Any] = (),
    spill_dir: str | Path | None = None,
    throttle: str | float | None = None,
    link: Link | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Runs ``step`` a few times and returns a :class:`~poochplan.formats.profile.Profile`.

    Parameters
    ----------
    step: runs forward and returns the scalar loss; the profiler calls backward and the optimizer. With
        ``backward="inside"`` the step does all of that itself, like the body of a loop, and its result is not used.
    model: the plan does not move its parameters and buffers, and its modules give ops their layers.
    optimizer: stepped in every iteration, so that its state is part of the memory. Optional.
    backward: who calls it. ``"inside"`` is for modes ``"run"``, ``"swap-all"`` and ``"auto"``. Steps are then
        profiled as they run, like in :func:`poochplan.auto`, and ``iterations``, ``warmup`` and ``accumulate`` are
        not used. The step runs about ten times, until each of its parts is measured.
    device: ``"cpu"`` or ``"cuda"``, where the model is; by default that of its parameters.
    mode: ``"run"`` measures the real step, in-core. ``"swap-all"`` measures it with every saved value on the host,
        for a step that does not fit; step times are those of swapping steps, minus the time of swapping. ``"auto"``
        is ``"run"`` if the in-core step fits and otherwise ``"swap-all"``; with ``roofline`` it is ``"fake"``.
        ``"fake"`` runs the step without memory and data, so that a step that fits on no machine can be planned;
        nothing is verified, and ``iterations`` is not used. Each distinct op is timed by itself (and cached in the
        user's cache folder). With ``roofline``, that gives the durations and the link, and ``spill_dir`` and
        ``throttle`` are not used. A model too large to build is built inside
        :func:`poochplan.profiler.fake.fake.building`.
    roofline: ``"v100"``, ``"a100"``, ``"h200"``, ``"p100"``, ``"titan-x"``, ``"cpu-core"`` or ``"FLOPS,BYTES"`` per
        second; for mode ``"fake"`` (or ``"auto"``).
    workload: the profile's name.
    iterations: number of steps timed by PyTorch alone, timed as planned steps run, and timed op by op; 5 each by
        default.
    warmup: steps before anything is measured; at least one, since the first step makes the optimizer's state.
    accumulate: gradients of the previous step still exist in forward (no ``zero_grad`` between steps).
    also: memory outside the step that the profiler cannot find, because no op of the step uses it: a data set, an
        average of the weights, the model that wraps this one for data-parallel training (its buckets count), another
        model and its optimizer. Modules, tensors, optimizers, containers of these, and objects that hold some in
        attributes.
    spill_dir, throttle: where to spill (see :func:`poochplan.apply`), and a limit such as ``"400MB/s"`` for each
        direction, here and later in the session; for the CPU device.
    link: use this link instead of measuring it.
    progress: called with a line of text at each stage.

    The model, its gradients, the optimizer and the generators are restored afterwards. Warns if the model
    is in eval mode, and if later steps contradict the timed ones (:mod:`poochplan.profiler.assembly.reconcile`).

    Raises
    ------
    StepError
        ``step`` returns no scalar that requires gradients, or one that depends on no parameter. Or it calls
        backward, takes gradients or steps the optimizer itself. Or its times are doubtful, twice
        (:func:`poochplan.profiler.assembly.reconcile.steady`). In mode ``"fake"`` also: it needs a tensor's
        content, or something is compiled.
    UsageError
        An argument is invalid, the model is not on the device, or there is no such device; or there is
        an open session on this thread or for this model; or the optimizer's step takes a closure.
    SpillError
        The spill directory cannot be used.
    """
    check_no_session("profile()", [model])
    begin_build()
    where = checked_device(model, device, iterations, warmup)
    check_mode(mode, roofline, iterations, where, throttle)
    check_backward(backward, mode, roofline)
    if backward == "outside":
        check_optimizer(optimizer)
    beside = tensors_beside(also)
    options = Options(
        workload=workload,
        iterations=ITERATIONS if iterations is None else iterations,
        warmup=max(1, warmup),
        spill_dir=spill_dir,
        throttle_bytes_per_s=None if throttle is None else parse_rate(throttle, "throttle"),
        link=link,
        say=progress or (lambda _: None),
    )

    def runner() -> Runner:
        return Runner(step, model, optimizer, accumulate, clock_of(where), beside)

    if backward == "inside":
        return _profile_inside(step, model, optimizer, where, mode, options)

    if mode == "fake" or roofline is not None:
        rates = None if roofline is None else parse_roofline(roofline)
        if rates is None:
            _wait_for_builds()
        with _session_memory(where):
            profile = fake_profile(runner(), rates, where, options, [CHOSE_FAKE] if mode == "auto" else [])
    else:
        profile = _profile_fitting(runner, where, mode, options)
    if roofline is None and profile.runtime is None:
        with _session_memory(where):
            profile = msgspec.structs.replace(profile, runtime=runtime_cost(where, torch.get_num_threads()))
    profile = msgspec.structs.replace(profile, notes=(*profile.notes, *runtime_notes(profile.runtime)))
    if EVAL_MODE in profile.notes:
        warnings.warn(f"poochplan: {EVAL_MODE}; call model.train() if it is trained so", UserWarning, stacklevel=2)
    return profile


def _profile_inside(
    step: Callable[[], Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    where: torch.device,
    mode: str,
    options: Options,
) -> Profile:
    """The profile of a step that does all of it itself."""

    def fits(profile: Profile) -> bool:
        if mode != "auto":
            return mode == "run"
        needed_bytes = profile.in_core_peak_bytes - sum(profile.static_bytes.values())
        return fitting_mode(needed_bytes, memory_left(where))[0] == "run"

    return profile_inside(
        step,
        model,
        optimizer,
        where,
        fits=fits,
        spill_dir=options.spill_dir,
        throttle_bytes_per_s=options.throttle_bytes_per_s,
        link=lambda: options.link or measure_link(where, options.spill_dir, options.throttle_bytes_per_s),
        workload=options.workload,
    )


def _profile_fitting(
    runner: Callable[[], Runner], where: torch.device, mode: RealMode | Literal["auto"], options: Options
) -> Profile:
    """The profile of a real step. ``auto`` asks a step without memory on the CPU, where running out of memory ends the
    process, and tries in-core first on CUDA. ``runner`` makes one for each try.
    """
    needed_bytes = needed_without_memory(runner()) if mode == "auto" and where.type == "cpu" else None
    if needed_bytes is not None:
        mode, why = fitting_mode(needed_bytes, available_bytes())
        options.say(why)
        return _profile_real(runner(), where, mode, options, [why])
    if mode != "auto" or where.type == "cpu":
        return _profile_real(runner(), where, mode, options, [])
    try:
        note = "mode auto chose run: the in-core step fits the device"
        return _profile_real(runner(), where, "run", options, [note])
    except torch.OutOfMemoryError:
        note = "mode auto chose swap-all: in-core the step ran out of the device's memory"
    gc.collect()  # the failed step's values, which the error's frames held
    torch.cuda.empty_cache()
    options.say(note)
    return _profile_real(runner(), where, "swap-all", options, [note])


def _profile_real(
    runner: Runner, where: torch.device, mode: RealMode | Literal["auto"], options: Options, notes: list[str]
) -> Profile:
    """The profile of a step that runs, in-core or swapping; ``auto``, for one that only runs with data, swaps until it
    knows what in-core would take.
    """
    model, say, plain_s = runner.model, options.say, None
    if options.link is None and where.type == "cpu":
        choose_spill_dir(options.spill_dir)  # raises at once where nothing can be spilled to
    with preserved(model, runner.optimizer), current(where), ExitStack() as memory, ExitStack() as stack:
        stack.enter_context(compiled_deferring(model, where.type))  # a model is compiled once, and by the first step
        if mode == "run":
            _wait_for_builds()
            plain_s = plain_step_s(runner, options)
        memory.enter_context(_session_memory(where))
        steps = memory.enter_context(StepFunction(runner, where, options.spill_dir, in_core=mode == "run"))
        if mode != "run":
            say(f"warming up ({options.warmup} steps, swapping)")
            for _ in range(options.warmup):
                steps.run(TimingWatch(steps.scene, None))
            _wait_for_builds()
        check_real(runner.loss)
        say("capturing one step")
        seen = steps.run(Capturing(steps.scene))
        capture = seen.capture
        link = options.link
        if link is None:  # only now: a wrong step is refused without waiting for it
            say("measuring the link")
            link = measure_link(where, options.spill_dir, options.throttle_bytes_per_s)
        draft = drafts(seen, link, options.workload)
        chosen: RealMode = "run" if mode == "run" else "swap-all"
        if mode == "auto":
            trial = draft("swap-all", capture.durations(), [dict.fromkeys(Phase, 0.0)], [])
            needed_bytes = trial.in_core_peak_bytes - sum(trial.static_bytes.values())
            chosen, why = fitting_mode(needed_bytes, available_bytes())
            say(why)
            notes = [*notes, why]
            if chosen == "run":
                memory.close()
                with collected_after(capture):
                    runner.one_step()  # in-core for the first time
                plain_s = plain_step_s(runner, options)
                memory.enter_context(_session_memory(where))
                steps = memory.enter_context(StepFunction(runner, where, options.spill_dir))
        timed = timed_steps(steps, capture, options, moves=chosen == "swap-all")
        notes = [*step_notes(seen), *notes, *timed.notes, *([SWAPPED] if chosen == "swap-all" else [])]
        unverified = with_seconds_beside(draft(chosen, timed.runs, timed.steps, notes), plain_s, timed)
        del capture, draft, seen
        stack.close()
        say("verifying replays")
        verified = verify(unverified, steps)
        if chosen == "swap-all":
            return verified
        kept = [steps.run(TimingWatch(steps.scene, keeping(verified))) for _ in range(KEPT_STEPS)]
        in_hooks = [one.in_hooks for one in kept if not one.why_not]
        finished = with_handles(verified, measured_on(where, torch.get_num_threads()), in_hooks)
        memory.close()
        finished = with_plain_again(finished, lambda: plain_step_s(runner, options))
        return _warned(finished, contradicted(timed.steps, [one.seconds for one in kept]))


def _warned(profile: Profile, note: str) -> Profile:
    """The profile with the note, which is also a warning; as it was where there is none."""
    if not note:
        return profile
    warnings.warn(f"poochplan: {note}", UserWarning, stacklevel=2)
    return msgspec.structs.replace(profile, notes=(*profile.notes, note))


def _wait_for_builds() -> None:
    """No compiler is to run beside what is measured."""
    library(None)
    with contextlib.suppress(NativeError):
        build()


@contextlib.contextmanager
def _session_memory(where: torch.device) -> Iterator[None]:
    """A block in which memory is as it is in a session: fresh memory must cost here what it costs there."""
    if where.type != "cpu":
        yield
        return
    step_scope()  # the compiled allocator asks for huge pages, once it is in force
    with fresh_memory():
        yield


CHOSE_FAKE = "mode auto chose fake: durations are to be a roofline's"


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
