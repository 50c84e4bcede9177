"""What the in-core step would take, from a step without memory: in-core a step that does not fit ends the process."""

from __future__ import annotations

import torch

from poochplan.formats.profile import Kind, Profile
from poochplan.profiler.assembly.assemble import untimed
from poochplan.profiler.live.capturing import Capturing
from poochplan.profiler.live.step_function import StepFunction
from poochplan.profiler.real import Runner
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.tensors.modes import compiled_modules
from poochplan.tensors.storages import static_keys

from .fake import FakeCapture, faked
from .roofline import parse_roofline


def needed_without_memory(runner: Runner) -> int | None:
    """Bytes that the in-core step takes beside what is there before the first one; None for a step that only runs with
    data. Runs the step twice, on fake tensors; what goes wrong there is left for the real step to tell.
    """
    model, optimizer = runner.model, runner.optimizer
    if compiled_modules(model):  # telling would mean to compile
        return None
    there_bytes = _state_bytes(optimizer) if optimizer is not None else 0
    try:
        with faked(model, optimizer) as fakes:
            runner.one_step()
            # The durations are not used.
            fake = FakeCapture(LayerTracker(), static_keys(model, "cpu"), fakes, parse_roofline("h200"))
            steps = StepFunction(runner, torch.device("cpu"), None)
            seen = steps.run(Capturing(steps.scene, fake), moves=False)
    except Exception:  # whatever the step does to tensors without content
        return None
    draft = untimed(seen.capture, seen.kinds, model, "fake", accumulate=runner.accumulate)
    return draft.in_core_peak_bytes - there_bytes - _bytes_before(draft)


def _bytes_before(draft: Profile) -> int:
    return sum(draft.static_bytes[kind] for kind in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT))


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the state that is there: none before the first step."""
    values = (value for entries in optimizer.state.values() for value in entries.values())
    return sum(
        x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor) and x.layout is torch.strided
    )
