"""profile: runs a few training steps and returns what they do, measured."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from ..errors import StepError, UsageError
from ..runtime.allocator import give_freed_memory_back
from ..runtime.devices import model_device
from ..runtime.signature import model_signature
from ..runtime.storages import has_storage, static_keys
from ..units import parse_rate
from .build import build_handles, build_ops, build_points, build_values, live_bytes, ops_fingerprint
from .capture import Capture
from .clock import Clock, clock_of, current, library_bytes
from .fake import FakeCapture, faked
from .fitting import available_bytes, fitting_mode
from .hosted import HostedCapture, HostStore, SwapAll
from .layers import LayerTracker
from .link import measure_link
from .op_bench import OpBench
from .preserve import preserved
from .presets import preset_link
from .roofline import Roofline, parse_roofline
from .schema import ALLOCATION_UNIT_BYTES, ROOFLINE, Device, Kind, Link, Phase, Profile, Value
from .timing import PhaseSeconds, reconcile, time_ops
from .verification import verify

Progress = Callable[[str], None]
RealMode = Literal["run", "swap-all"]
MODES = ("run", "swap-all", "auto", "fake")


def profile(
    step: Callable[[], torch.Tensor],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | None = None,
    mode: Literal["run", "swap-all", "auto", "fake"] = "run",
    roofline: str | None = None,
    workload: str = "",
    iterations: int = 5,
    warmup: int = 1,
    accumulate: bool = False,
    spill_dir: str | Path | None = None,
    throttle: str | float | None = None,
    link: Link | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Runs ``step`` a few times and returns a :class:`~poochplan.profiler.schema.Profile`.

    Parameters
    ----------
    step: runs forward and returns the scalar loss; the profiler calls backward and the optimizer.
    model: whose parameters and buffers the plan leaves alone, and whose modules give ops their layers.
    optimizer: stepped in every iteration, so that its state is part of the memory. Optional.
    device: ``"cpu"`` or ``"cuda"``, where the model is; by default the one on which its parameters are.
    mode: ``"run"`` measures the real step, in-core. ``"swap-all"`` measures it with every saved value on the host, for
        a step that does not fit; step times are those of swapping steps, less the time of swapping. ``"auto"`` is
        ``"run"`` where the in-core step fits and else ``"swap-all"``.
        ``"fake"`` runs the step without memory and without data, so that one that fits nowhere can be planned; nothing
        is verified, and ``iterations`` has no part. Each distinct op is timed by itself on tensors of its own (and
        remembered in the user's cache folder); with ``roofline``, that gives the durations and the link, and
        ``spill_dir`` and ``throttle`` have no part. A model too large to build is built inside
        :func:`poochplan.profiler.fake.building`.
    roofline: ``"v100"``, ``"a100"``, ``"h200"`` or ``"FLOPS,BYTES"`` per second; for mode ``"fake"`` only.
    workload: a name to find the profile by.
    iterations: uninstrumented steps that are timed, and as many with each op timed.
    warmup: steps before anything is measured; at least one, since the first step makes the optimizer's state.
    accumulate: gradients of the step before are still there in forward (no ``zero_grad`` between steps).
    spill_dir, throttle: where to spill (see :func:`poochplan.apply`) and the rate, such as ``"400MB/s"``, that each
        direction is held to, here and later in the session; for the CPU device.
    link: take this link as measured instead of measuring it.
    progress: called with a line of text at each stage.

    The model, its gradients, the optimizer and the generators are afterwards as they were before.

    Raises
    ------
    StepError
        ``step`` returns no scalar that requires gradients, or calls backward itself;
        in mode ``"fake"`` also: it needs a tensor's content, or something is compiled.
    UsageError
        An argument is not what it should be, the model is not on the device, or there is no such device.
    SpillError
        The spill directory cannot be used.
    """
    where = _check(model, device, iterations, warmup)
    _check_mode(mode, roofline, where, throttle)
    say = progress or (lambda _: None)
    options = _Options(
        workload=workload,
        iterations=iterations,
        warmup=max(1, warmup),
        spill_dir=spill_dir,
        throttle_bytes_per_s=None if throttle is None else parse_rate(throttle, "throttle"),
        link=link,
        say=say,
    )
    if mode == "fake":
        return _profile_fake(
            _Runner(step, model, optimizer, accumulate, clock_of(where)),
            None if roofline is None else parse_roofline(roofline),
            where,
            options,
        )
    if where.type == "cpu":
        give_freed_memory_back()  # before the first step: fresh memory must cost here what it costs in the session

    def real(mode: RealMode | Literal["auto"], note: str = "") -> Profile:
        runner = _Runner(step, model, optimizer, accumulate, clock_of(where))
        return _profile_real(runner, where, mode, options, [note] if note else [])

    if mode != "auto" or where.type == "cpu":
        return real(mode)
    try:
        return real("run", "mode auto chose run: the in-core step fits the device")
    except torch.OutOfMemoryError:
        note = "mode auto chose swap-all: in-core the step ran out of the device's memory"
    gc.collect()  # the failed step's values, which the error's frames held
    torch.cuda.empty_cache()
    say(note)
    return real("swap-all", note)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What :func:`profile` was asked for, of a real step."""

    workload: str
    iterations: int
    warmup: int
    spill_dir: str | Path | None
    throttle_bytes_per_s: float | None
    link: Link | None
    say: Progress


def _profile_real(
    runner: _Runner, where: torch.device, mode: RealMode | Literal["auto"], options: _Options, notes: list[str]
) -> Profile:
    """The profile of a step that runs, in-core or swapping; ``auto`` swaps until it knows what in-core would take."""
    model, say = runner.model, options.say
    with preserved(model, runner.optimizer), current(where), contextlib.ExitStack() as stack:
        link = options.link
        if link is None:
            say("measuring the link")
            link = measure_link(where, options.spill_dir, options.throttle_bytes_per_s)
        store = None
        if mode != "run":
            runner.swap_all = SwapAll(model, where, options.spill_dir, link, clock_of(where))
            stack.callback(runner.swap_all.close)
            store = HostStore(where, options.spill_dir)
            stack.callback(store.close)
        say(f"warming up ({options.warmup} steps{', swapping' if store else ''})")
        for _ in range(options.warmup):
            runner.one_step()
        say("capturing one step")
        capture, kinds = _capture(runner, _new_capture(model, where, store))
        if store is not None:
            store.close()  # its threads take address space
        draft = _assembler(capture, kinds, runner, where, link, options.workload)
        chosen: RealMode = "run" if mode == "run" else "swap-all"
        if mode == "auto":
            trial = draft("swap-all", [op.duration_s for op in capture.ops], [dict.fromkeys(Phase, 0.0)], [])
            chosen, why = fitting_mode(trial, available_bytes())
            say(why)
            notes = [*notes, why]
            if chosen == "run":
                runner.swap_all = None
                runner.one_step()  # in-core for the first time
        say(f"timing {options.iterations} steps")
        measured = [runner.one_step() for _ in range(options.iterations)]
        say(f"timing {len(capture.ops)} ops over {options.iterations} steps")
        times = time_ops(model, where, runner.one_step, capture.ops, options.iterations)
        notes = [*notes, *([times.note] if times.note else [])]
        durations_s = times.durations_s or [op.duration_s for op in capture.ops]
        if chosen == "swap-all":
            notes = [*notes, SWAPPED]
        unverified = draft(chosen, durations_s, measured, [*_notes(model), *notes])
        del capture, draft
        stack.close()
        say("verifying replays")
        return verify(unverified, model, runner.bare_step, options.spill_dir)


SWAPPED = (
    "every saved value was on the host while profiling: step times are estimates, of steps that swap everything "
    "less the time in which they swapped"
)


def _new_capture(model: torch.nn.Module, where: torch.device, store: HostStore | None) -> Capture:
    tracker, static = LayerTracker(), static_keys(model, where.type)
    return Capture(where.type, tracker, static) if store is None else HostedCapture(where.type, tracker, static, store)


def _assembler(
    capture: Capture, kinds: dict[int, Kind], runner: _Runner, where: torch.device, link: Link, workload: str
) -> Callable[[RealMode, list[float], list[PhaseSeconds], list[str]], Profile]:
    """:func:`_assemble` for the captured step, given mode, durations, measured steps and notes."""
    held_bytes = library_bytes(where)

    def draft(mode: RealMode, durations_s: list[float], measured: list[PhaseSeconds], notes: list[str]) -> Profile:
        return _assemble(
            capture,
            kinds,
            durations_s,
            measured,
            model=runner.model,
            link=link,
            workload=workload,
            mode=mode,
            device=_device(where),
            library_bytes=held_bytes,
            notes=notes,
            accumulate=runner.accumulate,
        )

    return draft


def _profile_fake(runner: _Runner, roofline: Roofline | None, where: torch.device, options: _Options) -> Profile:
    """The profile of a step without memory; see :mod:`poochplan.profiler.fake`."""
    model, say = runner.model, options.say
    with faked(model, runner.optimizer) as fakes:
        say(f"warming up without memory ({options.warmup} steps)")
        for _ in range(options.warmup):
            runner.one_step()
        say("capturing one step without memory")
        fake = FakeCapture(LayerTracker(), static_keys(model, "cpu"), fakes, roofline)
        capture, kinds = _capture(runner, fake)
    device, link, note = _machine_of(fake, roofline, where, options)
    phase_seconds = dict.fromkeys(Phase, 0.0)
    for op in capture.ops:
        phase_seconds[op.phase] += op.duration_s
    profile = _assemble(
        capture,
        kinds,
        [op.duration_s for op in capture.ops],
        [phase_seconds],
        model=model,
        link=link,
        workload=options.workload,
        mode="fake",
        device=device,
        notes=[
            *_notes(model),
            note,
            "no replay was verified: a kernel that writes past the dispatcher would not have been seen",
        ],
        accumulate=runner.accumulate,
    )
    return msgspec.structs.replace(profile, times=msgspec.structs.replace(profile.times, iterations=0))


def _machine_of(
    capture: FakeCapture, roofline: Roofline | None, where: torch.device, options: _Options
) -> tuple[Device, Link, str]:
    """The roofline's device and link, or this machine's, where the ops are given their durations; and a note."""
    if roofline is not None:
        device = Device(kind="cpu", name=roofline.name + ROOFLINE, memory_bytes=roofline.memory_bytes)
        note = f"durations are a roofline's ({roofline.name}), nothing was run"
        return device, options.link or preset_link(roofline.link), note
    link = options.link
    if link is None:
        options.say("measuring the link")
        link = measure_link(where, options.spill_dir, options.throttle_bytes_per_s)
    give_freed_memory_back()
    device = _device(where)
    bench = OpBench(device)
    for op, duration_s in zip(capture.ops, bench.seconds(capture.specs, options.say), strict=True):
        op.duration_s = duration_s
    counts = ", ".join(f"{count} {what}" for what, count in bench.counts.items())
    return device, link, f"durations are of distinct ops run by themselves on made-up tensors ({counts} from bytes)"


def _notes(model: torch.nn.Module) -> list[str]:
    return [] if model.training else ["the model was in eval mode: no dropout, no batch statistics"]


class _Runner:
    """One training step, phase by phase, timed."""

    def __init__(
        self,
        step: Callable[[], torch.Tensor],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        accumulate: bool,
        clock: Clock,
    ) -> None:
        self.step = step
        self.model = model
        self.optimizer = optimizer
        self.accumulate = accumulate
        self._clock = clock
        self.swap_all: SwapAll | None = None
        """What takes saved values to the host in :meth:`one_step`; None when they stay."""
        self.loss: torch.Tensor | None = None
        """Of the last step: it lives on through the next forward, as it does in ``loss = step()`` of a user's loop."""

    def one_step(self, enter: Callable[[Phase], Any] = lambda _: None) -> PhaseSeconds:
        """Runs it, swapping where it is to; ``enter`` is told each phase as it begins."""
        with self.swap_all.step() if self.swap_all is not None else contextlib.nullcontext():
            return self.bare_step(enter)

    def bare_step(self, enter: Callable[[Phase], Any] = lambda _: None) -> PhaseSeconds:
        """Runs it under nothing but what the caller has put around it."""
        if not self.accumulate:
            for parameter in self.model.parameters():
                parameter.grad = None
        times_s = [self._time_s()]
        enter(Phase.FORWARD)
        self.loss = checked_loss(self.step())
        times_s.append(self._time_s())
        enter(Phase.BACKWARD)
        self.loss.backward()
        times_s.append(self._time_s())
        enter(Phase.OPTIMIZER)
        if self.optimizer is not None:
            self.optimizer.step()
        times_s.append(self._time_s())
        return {phase: times_s[index + 1] - times_s[index] for index, phase in enumerate(Phase)}

    def _time_s(self) -> float:
        """Now, with all that was queued behind us, on a clock that stands still while values are swapped."""
        self._clock.synchronize()
        return time.perf_counter() - (self.swap_all.seconds if self.swap_all is not None else 0.0)


def _check(model: torch.nn.Module, device: str | None, iterations: int, warmup: int) -> torch.device:
    """Where the model is; raises what :func:`profile` says."""
    if iterations < 1 or warmup < 0:
        raise UsageError(f"iterations and warmup: expected at least 1 and 0, found {iterations} and {warmup}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise StepError("model: expected parameters that require gradients, found none; there is nothing to train")
    return model_device(model, device or next(model.parameters()).device.type)


def _check_mode(mode: str, roofline: str | None, where: torch.device, throttle: str | float | None) -> None:
    if mode not in MODES:
        raise UsageError(f"mode: expected one of {', '.join(MODES)}, found {mode!r}")
    if mode != "fake" and roofline is not None:
        raise UsageError(f'roofline: mode "{mode}" measures durations and takes none; drop it, or ask for mode "fake"')
    if mode == "fake" and where.type != "cpu":
        raise UsageError(f'device: mode "fake" takes the ops of the CPU, found a model on {where}; build it on the CPU')
    if throttle is not None and where.type != "cpu":
        raise UsageError(f"throttle: copies of {where} are not held to a rate; leave it out, or profile on the CPU")


def checked_loss(loss: Any) -> torch.Tensor:
    """What ``step()`` returned, if backward can start from it; raises ``StepError`` otherwise."""
    if not isinstance(loss, torch.Tensor):
        raise StepError(f"step(): expected the scalar loss, a tensor, found {type(loss).__name__}; return the loss")
    if loss.numel() != 1:
        raise StepError(f"step(): expected a scalar loss, found shape {list(loss.shape)}; reduce it, as with .mean()")
    if not loss.requires_grad:
        raise StepError(
            "step(): expected a loss that requires gradients, found one that does not; "
            "it must come from the model, outside torch.no_grad"
        )
    return loss


def _capture(runner: _Runner, capture: Capture) -> tuple[Capture, dict[int, Kind]]:
    model, optimizer, device = runner.model, runner.optimizer, capture.device_type
    gc.collect()  # a cycle that is collected in the middle of the step would move deaths
    kinds: dict[int, Kind] = {}

    def note(tensors: Any, kind: Kind) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and has_storage(tensor, device):
                kinds.setdefault(capture.value_of(tensor), kind)

    def enter(phase: Phase) -> None:
        capture.phase = phase
        if phase is Phase.OPTIMIZER:
            note((p.grad for p in model.parameters()), Kind.GRADIENT)

    note([runner.loss, *_gradients_held_by(runner.loss, set(model.parameters()))], Kind.INPUT)
    note(model.parameters(), Kind.PARAMETER)
    note(model.buffers(), Kind.BUFFER)
    if optimizer is not None:
        note((value for state in optimizer.state.values() for value in state.values()), Kind.OPTIMIZER_STATE)
    note((p.grad for p in model.parameters() if runner.accumulate), Kind.GRADIENT)
    with capture.running(model):
        runner.bare_step(enter)
    return capture, kinds


def _gradients_held_by(loss: torch.Tensor | None, parameters: set[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of what the step before made a leaf of (as wav2vec2 its input): the graph of its loss keeps them."""
    pending = [loss.grad_fn if loss is not None else None]
    seen: set[torch.autograd.graph.Node] = set()
    found: list[torch.Tensor] = []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf not in parameters and leaf.grad is not None:
            found.append(leaf.grad)
        pending += [following for following, _ in node.next_functions]
    return found


def _assemble(
    capture: Capture,
    kinds: dict[int, Kind],
    durations_s: list[float],
    measured: list[PhaseSeconds],
    *,
    model: torch.nn.Module,
    link: Link,
    workload: str,
    mode: Literal["run", "swap-all", "fake"],
    device: Device,
    notes: list[str],
    accumulate: bool,
    library_bytes: int = 0,
) -> Profile:
    durations_s, times = reconcile([op.phase for op in capture.ops], durations_s, measured)
    ops, points = build_ops(capture, durations_s), build_points(capture)
    last_tick = len(ops) + len(points) - 1
    values = build_values(capture, kinds, last_tick)
    fingerprint = ops_fingerprint(ops, points, values)
    if library_bytes:
        values = (*values, _library_value(library_bytes, last_tick))
    draft = Profile(
        workload=workload or type(model).__name__,
        mode=mode,
        device=device,
        versions=_versions(device),
        model=model_signature(model),
        inputs=capture.inputs or (),
        ops_fingerprint=fingerprint,
        times=times,
        in_core_peak_bytes=0,
        in_core_peak_layer="",
        static_bytes=_static_bytes(values),
        gradients_live_through_forward=accumulate,
        link=link,
        notes=tuple(notes),
        ops=ops,
        values=values,
        handles=build_handles(capture),
        points=points,
    )
    return _with_peak(draft)


def _with_peak(draft: Profile) -> Profile:
    curve = live_bytes(draft)
    peak_tick = int(np.argmax(curve))
    peak_op = min(int(np.searchsorted(draft.op_ticks, peak_tick)), len(draft.ops) - 1)
    return msgspec.structs.replace(
        draft, in_core_peak_bytes=int(curve[peak_tick]), in_core_peak_layer=draft.ops[peak_op].layer
    )


def _static_bytes(values: tuple[Any, ...]) -> dict[str, int]:
    kinds = (Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT, Kind.OPTIMIZER_STATE, Kind.INPUT)
    return {
        str(kind): sum(
            -(-v.size_bytes // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES for v in values if v.kind is kind
        )
        for kind in kinds
    }


def _library_value(size_bytes: int, last_tick: int) -> Value:
    """What cuBLAS holds all step long: part of every peak, and nobody's to decide about."""
    return Value(
        name="before/cublas",
        layer="",
        kind=Kind.INPUT,
        size_bytes=size_bytes,
        dtype="uint8",
        shape=(size_bytes,),
        born=-1,
        forward_death=last_tick,
        freed=last_tick,
    )


def _versions(device: Device) -> dict[str, str]:
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    if device.kind == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return versions


def _device(where: torch.device) -> Device:
    if where.type == "cuda":
        facts = torch.cuda.get_device_properties(where)
        return Device(kind="cuda", name=facts.name, memory_bytes=facts.total_memory)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        kind="cpu",
        name=platform.processor() or platform.machine(),
        memory_bytes=memory_bytes,
        threads=torch.get_num_threads(),
    )
