"""Timing: the uninstrumented step, the ops of the step one by one, and how the two are brought together."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from ..runtime.modes import ToggledMode, around_compiled
from ..runtime.operators import traits
from .capture import COMPILED_REGION
from .schema import Phase, StepTimes

PhaseSeconds = dict[Phase, float]


class OpTimer(ToggledMode):
    """Seconds of each op (pure views left out, as in the capture), in order of dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.durations_s: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = traits(func)
        if facts.pure_view:
            return func(*args, **(kwargs or {}))
        start_s = time.perf_counter()
        outputs = func(*args, **(kwargs or {}))
        self.durations_s.append(time.perf_counter() - start_s)
        self.names.append(facts.name)
        return outputs

    def opaque_region(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def region(*args: Any, **kwargs: Any) -> Any:
            self.names.append(COMPILED_REGION)
            self.durations_s.append(0.0)
            position = len(self.names) - 1
            with self.away():
                start_s = time.perf_counter()
                outputs = call(*args, **kwargs)
                self.durations_s[position] = time.perf_counter() - start_s
            return outputs

        return region


def time_ops(
    model: torch.nn.Module, one_step: Callable[[], PhaseSeconds], names: list[str], iterations: int
) -> list[float] | None:
    """Median seconds of each op over ``iterations`` steps; None when a step dispatched other ops than ``names``."""
    runs: list[list[float]] = []
    for _ in range(iterations):
        timer = OpTimer()
        with around_compiled(model, timer.opaque_region):
            timer.switch_on()
            try:
                one_step()
            finally:
                timer.switch_off()
        if timer.names != names:
            return None
        runs.append(timer.durations_s)
    return [float(value) for value in np.median(np.array(runs), axis=0)] if runs else None


def reconcile(
    phases: list[Phase], durations_s: list[float], measured: list[PhaseSeconds]
) -> tuple[list[float], StepTimes]:
    """Durations that add up, phase by phase, to the median of the uninstrumented phases.

    Where the ops' sum is smaller, the rest is the gap between launches and is spread over the phase's ops evenly; where
    it is larger, the instruments slowed the ops, and all of the phase are scaled down.
    """
    target_s = {phase: median(run[phase] for run in measured) for phase in Phase}
    sums_s = dict.fromkeys(Phase, 0.0)
    counts = dict.fromkeys(Phase, 0)
    for phase, duration_s in zip(phases, durations_s, strict=True):
        sums_s[phase] += duration_s
        counts[phase] += 1
    reconciled = []
    for phase, duration_s in zip(phases, durations_s, strict=True):
        missing_s = target_s[phase] - sums_s[phase]
        if missing_s >= 0:
            reconciled.append(duration_s + missing_s / counts[phase])
        else:
            reconciled.append(duration_s * target_s[phase] / sums_s[phase])
    scales = {phase: target_s[phase] / sums_s[phase] if sums_s[phase] > 0 else 1.0 for phase in Phase}
    steps_s = [sum(run.values()) for run in measured]
    low, high = np.percentile(steps_s, [25, 75])
    return reconciled, StepTimes(
        forward_s=target_s[Phase.FORWARD],
        backward_s=target_s[Phase.BACKWARD],
        optimizer_s=target_s[Phase.OPTIMIZER],
        step_s=sum(target_s.values()),
        spread_s=float(high - low),
        iterations=len(measured),
        forward_scale=scales[Phase.FORWARD],
        backward_scale=scales[Phase.BACKWARD],
        optimizer_scale=scales[Phase.OPTIMIZER],
    )
