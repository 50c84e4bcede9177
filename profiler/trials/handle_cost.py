"""What the runtime itself takes of the calling thread, in CPU time: on a small network, step against step; its hooks on
the profiled model itself where that fits, since among a real step's ops they find less in the processor's cache.

On CUDA the calling thread queues work ahead of the device, so that its own time is no part of the step's.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from torch import nn

from poochplan.errors import SpillError
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile, RuntimeCost
from poochplan.formats.queries import saved_values
from poochplan.profiler.assembly.assemble import untimed
from poochplan.profiler.capture.capture import Capture
from poochplan.profiler.capture.clock import CpuClock
from poochplan.profiler.real import Runner, captured
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.profiler.step.preserve import restored
from poochplan.profiler.step.states import GeneratorStates
from poochplan.runtime.devices.cpu import CpuDevice
from poochplan.runtime.devices.opening import model_device, open_device
from poochplan.runtime.drivers.planned import Planned
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.replays.recorder import Recorder
from poochplan.runtime.replays.tape import Tape
from poochplan.tensors.storages import static_keys

from .plans import instructions_for, under

COLUMNS, LAYERS_OF_ONE_ROW, LAYERS, ROWS = 1024, 150, 20, 64
"""Handles and recording are timed on many values of one row, which cost next to nothing themselves; swapping on fewer
of 256 KiB, large enough that their pages go back to the system, as those of saved values do."""
_REPEATS = 5
_STEPS = 2

Step = Callable[[], object]


class Chain(nn.Module):
    """Two ops, two handles and one value a layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(COLUMNS, device="cpu")) for _ in range(layers))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            batch = torch.tanh(batch * scale)
        return batch


@functools.cache
def runtime_cost(device_type: str, threads: int) -> RuntimeCost | None:
    """Seconds per handle, swapped value and recorded op on this machine, measured once; None on CUDA, and where there
    is no disk to swap to.
    """
    if device_type != "cpu":
        return None
    with contextlib.suppress(SpillError), restored(GeneratorStates()):
        return measure_runtime()
    return None


def with_handles_of(profile: Profile, model: nn.Module, one_step: Step, spill_dir: str | Path | None) -> Profile:
    """The profile with what the runtime costs, ``handle_s`` measured on the model itself in steps that keep every value
    under the engine; on the small network where steps differ in what they save.
    """
    cost = runtime_cost(profile.device.kind, torch.get_num_threads())
    if cost is None:
        return profile
    keeping = instructions_for(profile, [Decision.KEEP] * len(saved_values(profile)))
    device = open_device(model_device(model, profile.device.kind), spill_dir)
    try:
        engine = Engine(Planned(msgspec.structs.replace(keeping, record_from_start=False)), device, model)
        tried_s = [_seconds_in_hooks(engine, model, one_step) for _ in range(_STEPS)]
    finally:
        device.close()
    steps_s = [seconds for seconds in tried_s if seconds is not None]
    if steps_s and profile.handles:
        cost = msgspec.structs.replace(cost, handle_s=min(steps_s) / len(profile.handles))
    return msgspec.structs.replace(profile, runtime=cost)


def _seconds_in_hooks(engine: Engine, model: nn.Module, one_step: Step) -> float | None:
    """CPU seconds that one step spends in the engine's hooks; None for a step that is not the profile's."""
    spent_s = 0.0

    def timed(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(argument: Any) -> Any:
            nonlocal spent_s
            start_s = time.thread_time()
            try:
                return hook(argument)
            finally:
                spent_s += time.thread_time() - start_s

        return run

    with warnings.catch_warnings(), under(engine, model, timed(engine.pack), timed(engine.unpack)):
        warnings.simplefilter("ignore", RuntimeWarning)  # of steps that differ, as the profile says
        one_step()
    return None if engine.segment.diverged else spent_s


def measure_runtime() -> RuntimeCost:
    """The measurement, on the CPU device; raises ``SpillError``."""
    model, batch = Chain(LAYERS_OF_ONE_ROW), torch.ones(1, COLUMNS, device="cpu")
    (plain_s, small_s), handles, _ = _under_plans(model, 1, [Decision.KEEP])
    (_, keep_s, swap_s), _, values = _under_plans(Chain(LAYERS), ROWS, [Decision.KEEP, Decision.SWAP])
    with torch.no_grad():
        bare_s, recorded_s = _medians_s(lambda: model(batch), _recorded(model, lambda: model(batch)))
    return RuntimeCost(
        handle_s=max(0.0, small_s - plain_s) / handles,
        swap_s=max(0.0, swap_s - keep_s) / values,
        record_s=max(0.0, recorded_s - bare_s) / (2 * LAYERS_OF_ONE_ROW),
    )


def _under_plans(model: Chain, rows: int, decisions: list[Decision]) -> tuple[list[float], int, int]:
    """Seconds of a plain step and of one under each decision for all values; how many handles and values it has."""
    batch = torch.full((rows, COLUMNS), 0.5, device="cpu")

    def step() -> torch.Tensor:
        model.zero_grad()
        return model(batch).sum()

    def plain() -> None:
        step().backward()

    profile = _profile_of(model, step)
    values = len({handle.value for handle in profile.handles})
    with contextlib.ExitStack() as stack:
        planned = [stack.enter_context(_planned(model, plain, profile, [decision] * values)) for decision in decisions]
        return _medians_s(plain, *planned), len(profile.handles), values


def _profile_of(model: nn.Module, step: Callable[[], torch.Tensor]) -> Profile:
    capture = Capture("cpu", LayerTracker(), static_keys(model, "cpu"))
    capture, kinds = captured(Runner(step, model, None, False, CpuClock()), capture)
    return untimed(capture, kinds, model, "run")


@contextlib.contextmanager
def _planned(model: nn.Module, plain: Step, profile: Profile, decisions: list[Decision]) -> Iterator[Step]:
    """A call that runs the step under the engine."""
    device = CpuDevice()
    instructions = msgspec.structs.replace(instructions_for(profile, decisions), record_from_start=False)
    try:
        engine = Engine(Planned(instructions), device, model)

        def planned() -> None:
            with under(engine, model, engine.pack, engine.unpack):
                plain()

        yield planned
    finally:
        device.close()


def _recorded(model: nn.Module, step: Step) -> Step:
    tape = Tape("cpu")
    tape.static = static_keys(model, "cpu")
    recorder = Recorder(tape)

    def recorded() -> None:
        tape.forget(in_use=False)
        recorder.switch_on()
        try:
            step()
        finally:
            recorder.switch_off()

    return recorded


def _medians_s(*steps: Step) -> list[float]:
    """Median CPU seconds of each, run in turn behind a first round that is thrown away."""
    rounds: list[list[float]] = []
    for _ in range(1 + _REPEATS):
        times_s = []
        for step in steps:
            start_s = time.thread_time()
            step()
            times_s.append(time.thread_time() - start_s)
        rounds.append(times_s)
    return [median(column) for column in zip(*rounds[1:], strict=True)]
