"""Reconciliation: ops timed one by one, brought together with the uninstrumented step."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from poochplan.formats.profile import LayerTimes, Phase, StepTimes

PhaseSeconds = dict[Phase, float]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reconciled:
    """Seconds that add up to those of the uninstrumented step, and how far they spread."""

    durations_s: list[float]
    spreads_s: list[float]
    layer_times: tuple[LayerTimes, ...]
    times: StepTimes


def reconcile(phases: list[Phase], layers: list[str], runs: Floats, measured: list[PhaseSeconds]) -> Reconciled:
    """Durations that add up, phase by phase, to the uninstrumented phases (:func:`typical_phases`).

    Where the ops' sum is smaller, the rest is the gap between launches and is spread over the phase's ops evenly; where
    it is larger, the instruments slowed the ops, and all of the phase are scaled down, their spreads too. ``runs`` are
    seconds of each op in each timed step, (steps, ops).
    """
    medians_s = np.median(runs, axis=0)
    factors, added_s = np.ones(len(phases)), np.zeros(len(phases))
    scales: dict[Phase, float] = {}
    targets_s = typical_phases(measured)
    for phase, target_s in targets_s.items():
        ours = np.array([other is phase for other in phases], dtype=bool)
        sum_s = float(medians_s[ours].sum())
        scales[phase] = target_s / sum_s if sum_s > 0 else 1.0
        if target_s >= sum_s:
            added_s[ours] = (target_s - sum_s) / max(1, int(ours.sum()))
        else:
            factors[ours] = scales[phase]
    return Reconciled(
        durations_s=[float(second) for second in medians_s * factors + added_s],
        spreads_s=_spreads_s(runs * factors),
        layer_times=_layer_times(phases, layers, runs * factors + added_s),
        times=_step_times(measured, scales),
    )


def typical_phases(measured: list[PhaseSeconds]) -> PhaseSeconds:
    """Seconds of each phase that add up to the median step. The phases' medians alone add up to less: each leaves out
    the steps in which its own phase was slow.
    """
    medians_s = {phase: median(run[phase] for run in measured) for phase in Phase}
    whole_s, step_s = sum(medians_s.values()), median(sum(run.values()) for run in measured)
    return {phase: second * step_s / whole_s if whole_s > 0 else second for phase, second in medians_s.items()}


def _step_times(measured: list[PhaseSeconds], scales: dict[Phase, float]) -> StepTimes:
    seconds = typical_phases(measured)
    spreads_s = _spreads_s(np.array([[*(run[phase] for phase in Phase), sum(run.values())] for run in measured]))
    return StepTimes(
        forward_s=seconds[Phase.FORWARD],
        backward_s=seconds[Phase.BACKWARD],
        optimizer_s=seconds[Phase.OPTIMIZER],
        step_s=sum(seconds.values()),
        forward_spread_s=spreads_s[0],
        backward_spread_s=spreads_s[1],
        optimizer_spread_s=spreads_s[2],
        spread_s=spreads_s[3],
        iterations=len(measured),
        forward_scale=scales[Phase.FORWARD],
        backward_scale=scales[Phase.BACKWARD],
        optimizer_scale=scales[Phase.OPTIMIZER],
    )


def _layer_times(phases: list[Phase], layers: list[str], runs: Floats) -> tuple[LayerTimes, ...]:
    """Of the layers with ops in forward or backward, in order; none where the ops were timed once."""
    if len(runs) < 2:
        return ()
    rows = {layer: row for row, layer in enumerate(dict.fromkeys(layers))}
    sums_s = {phase: np.zeros((len(rows), len(runs))) for phase in Phase}
    for op, (phase, layer) in enumerate(zip(phases, layers, strict=True)):
        sums_s[phase][rows[layer]] += runs[:, op]
    forward, backward = sums_s[Phase.FORWARD], sums_s[Phase.BACKWARD]
    columns: zip[Any] = zip(
        np.median(forward, axis=1), _spreads_s(forward.T), np.median(backward, axis=1), _spreads_s(backward.T),
        strict=True,
    )  # fmt: skip
    return tuple(
        LayerTimes(
            layer=layer,
            forward_s=float(forward_s),
            forward_spread_s=forward_spread_s,
            backward_s=float(backward_s),
            backward_spread_s=backward_spread_s,
        )
        for layer, (forward_s, forward_spread_s, backward_s, backward_spread_s) in zip(rows, columns, strict=True)
        if forward_s or backward_s
    )


def _spreads_s(runs: Floats) -> list[float]:
    """Interquartile range of each column, to three digits: a file of many ops stays small."""
    low, high = np.percentile(runs, [25, 75], axis=0)
    return [float(f"{spread:.3g}") for spread in high - low]
