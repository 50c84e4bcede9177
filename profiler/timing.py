"""Timing: the uninstrumented step, the ops of the step one by one, and how the two are brought together."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from ..runtime.modes import ToggledMode, around_compiled
from ..runtime.operators import traits
from .capture import COMPILED_REGION
from .clock import Clock, clock_of
from .schema import Phase, StepTimes

PhaseSeconds = dict[Phase, float]


class OpTimer(ToggledMode):
    """Seconds of each op (pure views left out, as in the capture), in order of dispatch."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.names: list[str] = []
        self._clock = clock
        self._marks: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = traits(func)
        if facts.pure_view:
            return func(*args, **(kwargs or {}))
        return self._timed(facts.name, func, args, kwargs or {})

    def opaque_region(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def region(*args: Any, **kwargs: Any) -> Any:
            with self.away():
                return self._timed(COMPILED_REGION, call, args, kwargs)

        return region

    def _timed(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begin = self._clock.begin()
        outputs = call(*args, **kwargs)
        self._marks.append((begin, self._clock.end()))
        self.names.append(name)
        return outputs

    def durations_s(self) -> list[float]:
        """Seconds of each op so far."""
        self._clock.synchronize()
        return [self._clock.seconds(begin, end) for begin, end in self._marks]


def time_ops(
    model: torch.nn.Module, where: torch.device, one_step: Callable[[], PhaseSeconds], names: list[str], iterations: int
) -> list[float] | None:
    """Median seconds of each op over ``iterations`` steps; None when a step dispatched other ops than ``names``."""
    runs: list[list[float]] = []
    for _ in range(iterations):
        timer = OpTimer(clock_of(where))
        with around_compiled(model, timer.opaque_region):
            timer.switch_on()
            try:
                one_step()
            finally:
                timer.switch_off()
        if timer.names != names:
            return None
        runs.append(timer.durations_s())
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
