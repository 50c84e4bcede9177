"""profile: runs a few training steps, and returns a measured Profile of them."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import torch

from poochplan.errors import NativeError, StepError
from poochplan.formats.profile import Link, Profile
from poochplan.planner.simulator.evaluator import begin_build, library
from poochplan.profiler.assembly.assemble import EVAL_MODE, runtime_notes
from poochplan.profiler.assembly.reconcile import JUDGED_S, MUCH
from poochplan.profiler.capture.clock import current
from poochplan.profiler.fake.fake_profile import beside_static, fake_profile, step_without_memory
from poochplan.profiler.fake.roofline import parse_roofline
from poochplan.profiler.live.after_capture import PhaseTiming
from poochplan.profiler.live.capturing import Capturing
from poochplan.profiler.live.loop_observer import LoopObserver, NoPlans
from poochplan.profiler.live.step_function import StepFunction
from poochplan.profiler.live.step_kinds import Loop, StepKind
from poochplan.profiler.live.study import StudyOptions, study
from poochplan.profiler.step.forward_only import check_real
from poochplan.profiler.step.preserve import preserved
from poochplan.profiler.trials.machine_facts import on_worker_thread, with_cached_cost
from poochplan.runtime.arena.library import build, fresh_memory
from poochplan.runtime.compiled_hooks import hooks_for
from poochplan.runtime.devices.backend import backend_of, memory_left
from poochplan.runtime.devices.cpu import choose_spill_dir
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.messages import users_line
from poochplan.runtime.metering.allocated import step_scope
from poochplan.runtime.open_sessions import check_no_session
from poochplan.runtime.session import Session
from poochplan.runtime.step_policies.step_policy import SwapEach
from poochplan.tensors.host_memory import available_bytes, fitting_mode
from poochplan.torch_private.sharding import is_sharded
from poochplan.units import counted, parse_rate

from .link import measure_link
from .request import (
    Options,
    ProgressCallback,
    check_mode,
    check_optimizer,
    check_whole,
    checked_device,
    tensors_beside,
)

NewSteps = Callable[..., StepFunction]
"""Makes the step function for one try; its keyword is ``in_core``."""
RealMode = Literal["run", "swap-all"]
ITERATIONS = 5
MOST_STEPS = 60
"""Most steps with ``backward="inside"`` until each kind of segment is profiled."""


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
    progress: ProgressCallback | None = None,
) -> Profile:
    """Runs ``step`` a few times and returns a :class:`~poochplan.formats.profile.Profile`.

    Parameters
    ----------
    step: runs forward and returns the scalar loss; the profiler calls backward and the optimizer. With
        ``backward="inside"`` the step calls both itself, like the body of a loop, and its result is not used.
    model: the plan does not move its parameters and buffers. Its modules are the layers of the ops.
    optimizer: stepped in every iteration, so that its state is part of the memory. Optional.
    backward: whether the profiler or the step calls backward. ``"inside"`` is for modes ``"run"``, ``"swap-all"`` and
        ``"auto"``. Steps are then profiled as they run, like in :func:`poochplan.auto`. The step runs about ten times,
        until each of its parts is measured. ``iterations``, ``warmup`` and ``accumulate`` are not used.
    device: ``"cpu"``, ``"cuda"`` or another accelerator's type, where the model is; by default that of its parameters.
    mode: ``"run"`` measures the real step, in-core. ``"swap-all"`` measures it with every saved value on the host,
        for a step that does not fit; step times are those of swapping steps, minus the time of swapping. ``"auto"``
        is ``"run"`` if the in-core step fits and otherwise ``"swap-all"``; with ``roofline`` it is ``"fake"``.
        ``"fake"`` runs the step without memory and data, so that a step that fits on no machine can be planned. No
        replay is verified, and ``iterations`` is not used. Each distinct op is timed by itself; its time is cached in
        the user's cache folder. ``roofline`` gives durations and link instead; ``spill_dir`` and ``throttle`` are then
        not used. Build a model that is too large for memory inside :func:`poochplan.profiler.fake.fake.building`.
    roofline: ``"v100"``, ``"a100"``, ``"h100"``, ``"h200"``, ``"p100"``, ``"titan-x"``, ``"cpu-core"`` or
        ``"FLOPS,BYTES"`` per second; for mode ``"fake"`` (or ``"auto"``).
    workload: the profile's name.
    iterations: number of steps timed by PyTorch alone, timed as planned steps run, and timed op by op; 5 each by
        default.
    warmup: steps before any measurement; at least one, because the first step makes the optimizer's state.
    accumulate: gradients of the previous step still exist in forward (no ``zero_grad`` between steps).
    also: memory outside the step that the profiler cannot find, because no op of the step uses it: a data set, an
        average of the weights, the model that wraps this one for data-parallel training (its buckets count), another
        model and its optimizer. Pass modules, tensors, optimizers, containers of these, or objects with such
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
        ``step`` returns no scalar that requires gradients, or one that depends on no parameter. Or it calls backward,
        takes gradients or steps the optimizer itself. Or its timed steps were doubtful in two rounds, and the medians
        of the rounds differ by more than half (:func:`poochplan.profiler.assembly.reconcile.steady`). Or, in mode
        ``"fake"``, it needs a tensor's content or calls compiled code of another compiler than Inductor.
    UsageError
        An argument is invalid, the model is not on the device, or there is no such device. Or this thread or this
        model has an open session. Or the optimizer's step takes a closure.
    SpillError
        The spill directory cannot be used.
    """
    check_no_session("profile()", [model])
    begin_build()
    check_whole(model, step)
    where = checked_device(model, device, iterations, warmup)
    check_mode(mode, backward, roofline, iterations, where, throttle)
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

    if backward == "inside":
        return _profile_inside(step, model, optimizer, where, mode, options)

    steps: NewSteps = partial(
        StepFunction, step, model, optimizer, where, accumulate=accumulate, beside=beside, spill_dir=spill_dir
    )
    if mode == "fake" or roofline is not None:
        rates = None if roofline is None else parse_roofline(roofline)
        if rates is None:
            _wait_for_builds()
        with _session_memory(where):
            notes = ["mode auto chose fake, because a roofline was given"] if mode == "auto" else []
            profile = fake_profile(steps(), rates, options, notes)
    else:
        profile = _profile_fitting(steps, where, mode, options)
    if roofline is None and profile.runtime is None:
        with _session_memory(where):
            profile = with_cached_cost(profile, where)
    profile = msgspec.structs.replace(profile, notes=(*profile.notes, *runtime_notes(profile.runtime)))
    if EVAL_MODE in profile.notes:
        warnings.warn(
            f"poochplan: {EVAL_MODE}; call model.train() if it is trained so", UserWarning, stacklevel=users_line()
        )
    return profile


def _profile_inside(
    step: Callable[[], Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    where: torch.device,
    mode: str,
    options: Options,
) -> Profile:
    """The profile of a step that calls backward itself: of its largest segment in-core. Raises ``StepError``."""
    spill_dir, rate = options.spill_dir, options.throttle_bytes_per_s

    def fits(profile: Profile) -> bool:
        if mode != "auto":
            return mode == "run"
        return fitting_mode(beside_static(profile), memory_left(where))[0] == "run"

    study_options = StudyOptions(
        link=lambda: on_worker_thread(lambda: options.link or measure_link(where, spill_dir, rate)),
        fits=fits,
        with_costs=lambda one, kept: with_cached_cost(one, where, kept),
        workload=options.workload,
    )
    loop, plans = Loop(model, [] if optimizer is None else [optimizer], where), NoPlans()
    observer = LoopObserver(loop, study_options, plans, spill_dir)
    device = partial(open_device, where, spill_dir, rate)
    session = Session({"": model}, where, device, plans, observer, meter="never", is_guarded=False)
    with preserved(model, optimizer), session:
        for _ in range(MOST_STEPS):
            step()
            session.wait_until_planned()
            if loop.kinds and not loop.is_studied:
                break
    return _largest(list(loop.kinds.values()))


def _largest(kinds: list[StepKind]) -> Profile:
    profiled = [kind.profile for kind in kinds if kind.profile is not None]
    if not profiled:
        why = next((kind.refused for kind in kinds if kind.refused), "it saves nothing that a backward uses")
        raise StepError(
            f"step(): expected one that runs forward, backward and the optimizer's step, found that {why}; "
            'return the loss and leave backward to the profiler (backward="outside")'
        )
    largest = max(profiled, key=lambda profile: profile.in_core_peak_bytes)
    if len(kinds) == 1:
        return largest
    note = f"the step has {len(kinds)} kinds of segments, from a first save to a backward; this is the largest in-core"
    return msgspec.structs.replace(largest, notes=(*largest.notes, note))


def _profile_fitting(
    new_steps: NewSteps, where: torch.device, mode: RealMode | Literal["auto"], options: Options
) -> Profile:
    """The profile of a real step. ``auto`` tries the in-core step first, except on the CPU, where running out of memory
    ends the process. There a step without memory measures the peak first; if the step needs data, a swapping one does.
    """
    if mode != "auto":
        return _profile_real(new_steps, where, mode, options, [])
    if where.type == "cpu":
        first = new_steps()  # collectives need memory
        draft = None if is_sharded(first.model) else step_without_memory(first)
        if draft is None:
            swapping = new_steps(in_core=False)
            with _restoring(swapping, where, options), _warm(swapping, where, "swap-all", options):
                draft = swapping.run(Capturing(swapping.context)).untimed("run")
        mode, why = fitting_mode(beside_static(draft), available_bytes())
        options.say(why)
        return _profile_real(new_steps, where, mode, options, [why])
    try:
        note = "mode auto chose run: the in-core step fits the device"
        return _profile_real(new_steps, where, "run", options, [note])
    except torch.OutOfMemoryError:
        note = "mode auto chose swap-all: in-core the step ran out of the device's memory"
    gc.collect()  # frees the failed step's values, which the error's frames held
    backend_of(where).empty_cache()
    options.say(note)
    return _profile_real(new_steps, where, "swap-all", options, [note])


@contextlib.contextmanager
def _restoring(steps: StepFunction, where: torch.device, options: Options) -> Iterator[StepFunction]:
    """A block of steps, after which model, optimizer and generators are restored."""
    if options.link is None and where.type == "cpu":
        choose_spill_dir(options.spill_dir)  # raises at once if the directory cannot be used
    model = steps.model  # compiled once, by the first step
    with preserved(model, steps.optimizer), current(where), hooks_for(model).compiled_deferring(where.type):
        yield steps


@contextlib.contextmanager
def _warm(steps: StepFunction, where: torch.device, mode: RealMode, options: Options) -> Iterator[None]:
    """A block with a session's memory settings, after the warm-up steps."""
    with _session_memory(where), steps:
        if mode == "swap-all":
            options.say(f"warming up ({counted(options.warmup, 'step')}, swapping)")
            for _ in range(options.warmup):
                steps.run(PhaseTiming(steps.context, SwapEach(at_once=True)))
            _wait_for_builds()
        check_real(steps.loss)
        yield


def _profile_real(
    new_steps: NewSteps, where: torch.device, mode: RealMode, options: Options, notes: list[str]
) -> Profile:
    """The profile of a step that really runs, in-core or swapping."""
    with _restoring(new_steps(in_core=mode == "run"), where, options) as steps:
        plain_s = None
        if mode == "run":
            _wait_for_builds()
            plain_s = _plain_step_s(steps, options)
        study_options = StudyOptions(
            link=lambda: options.link or measure_link(where, options.spill_dir, options.throttle_bytes_per_s),
            fits=lambda _: mode == "run",
            with_costs=lambda one, kept: with_cached_cost(one, where, kept),
            workload=options.workload,
            timed=options.iterations,
            notes=notes,
            plain_s=plain_s,
            say=options.say,
        )
        with _warm(steps, where, mode, options):
            profile = steps.studied(study(steps.context, study_options))
        return with_plain_again(profile, lambda: _plain_step_s(steps, options))


def _wait_for_builds() -> None:
    """Waits until no compiler runs, because it would disturb measurements."""
    library(None)
    with contextlib.suppress(NativeError):
        build()


@contextlib.contextmanager
def _session_memory(where: torch.device) -> Iterator[None]:
    """A block with a session's memory settings, so that fresh memory takes the same time as in a session."""
    if where.type != "cpu":
        yield
        return
    step_scope()  # installs the compiled allocator, which asks for huge pages
    with fresh_memory():
        yield


def _plain_step_s(steps: StepFunction, options: Options) -> float:
    """The median seconds of a step by PyTorch alone, without any setting of a session. Warm-up steps run first."""
    options.say(f"warming up ({counted(options.warmup, 'step')}), and timing {options.iterations} by PyTorch alone")
    for _ in range(options.warmup):
        steps.one_step()
    return median(sum(steps.timed().values()) for _ in range(options.iterations))


def with_plain_again(profile: Profile, again: Callable[[], float]) -> Profile:
    """The profile with a doubtful ``plain_step_s`` timed ``again``: one more than half longer than the step in the
    session's memory. The shorter time counts, because a busy machine makes no step shorter.
    """
    times = profile.times
    beside_s = times.step_s if times.unserved_step_s is None else times.unserved_step_s
    if times.plain_step_s is None or times.plain_step_s <= max(JUDGED_S, (1 + MUCH) * beside_s):
        return profile
    times = msgspec.structs.replace(times, plain_step_s=min(times.plain_step_s, again()))
    return msgspec.structs.replace(profile, times=times)
