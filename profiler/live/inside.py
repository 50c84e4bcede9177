"""A step that calls backward and steps the optimizer itself: profiled where that happens, over a few of its runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from poochplan.errors import StepError
from poochplan.formats.profile import Link, Profile
from poochplan.profiler.step.preserve import preserved
from poochplan.runtime.devices.device import Device
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.session import Session, Settings

from .lines import Line
from .observer import Observer

MOST_STEPS = 60


def profile_inside(
    step: Callable[[], Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    where: torch.device,
    *,
    fits: Callable[[Profile], bool],
    spill_dir: str | Path | None,
    throttle_bytes_per_s: float | None,
    link: Callable[[], Link],
    workload: str,
) -> Profile:
    """The profile of the segment of the step that takes the most memory in-core; a note says how many there are.

    All is afterwards as it was before (:func:`~poochplan.profiler.step.preserve.preserved`). Raises ``StepError`` where
    no segment of the step could be profiled.
    """

    def opened() -> Device:
        return open_device(where, spill_dir, throttle_bytes_per_s)

    optimizers = [] if optimizer is None else [optimizer]
    observer = Observer(model, optimizers, where, spill_dir=spill_dir, link=link, fits=fits, workload=workload)
    unmetered = Settings(meter="never")
    with preserved(model, optimizer), Session({"": model}, where, opened, observer, unmetered) as session:
        for _ in range(MOST_STEPS):
            step()
            session.wait_until_planned()
            if observer.lines and all(line.next_watch is None for line in observer.lines.values()):
                break
    return _largest(list(observer.lines.values()))


def _largest(lines: list[Line]) -> Profile:
    profiled = [line.profile for line in lines if line.profile is not None]
    if not profiled:
        why = next((line.refused for line in lines if line.refused), "it saves nothing that a backward uses")
        raise StepError(
            f"step(): expected one that runs forward, backward and the optimizer's step, found that {why}; "
            'return the loss and leave backward to the profiler (backward="outside")'
        )
    largest = max(profiled, key=lambda profile: profile.in_core_peak_bytes)
    if len(lines) == 1:
        return largest
    note = f"the step has {len(lines)} kinds of segments, from a first save to a backward; this is the largest in-core"
    return msgspec.structs.replace(largest, notes=(*largest.notes, note))
