"""Reconciliation: ops timed one by one, adapted to the uninstrumented step; and whether timed steps can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from poochplan.errors import StepError
from poochplan.formats.occupancy import Floats
from poochplan.formats.profile import LayerTimes, Phase, StepTimes
from poochplan.units import format_seconds

PhaseSeconds = dict[Phase, float]
JUDGED_S = 0.02
"""If a step took less than this, its time is not judged: one disturbance by the machine is longer."""
FEWEST_REFUSED = 3
"""Rounds of fewer steps have no spread. Their times may be uncertain, and are never refused."""
MUCH = 0.5
"""Share of a step by which times must differ to contradict each other. A shared machine's noise stays below it."""


@dataclass(frozen=True)
class Reconciled:
    """Seconds that add up to those of the uninstrumented step, and their spreads."""

    durations_s: list[float]
    spreads_s: list[float]
    layer_times: tuple[LayerTimes, ...]
    times: StepTimes


def reconcile(phases: list[Phase], layers: list[str], runs: Floats, measured: list[PhaseSeconds]) -> Reconciled:
    """Durations that add up, phase by phase, to the uninstrumented phases (:func:`typical_phases`).

    If the ops' sum is smaller, the rest is the gap between launches, and is spread over the phase's ops evenly. If it
    is larger, the instruments slowed the ops, and all ops of the phase are scaled down, with their spreads. ``runs``
    are seconds of each op in each timed step, (steps, ops).
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
    """Seconds of each phase that add up to the median step. The phases' medians alone would add up to less."""
    medians_s = {phase: median(run[phase] for run in measured) for phase in Phase}
    whole_s, step_s = sum(medians_s.values()), median(sum(run.values()) for run in measured)
    return {phase: second * step_s / whole_s if whole_s > 0 else second for phase, second in medians_s.items()}


def _step_times(measured: list[PhaseSeconds], scales: dict[Phase, float]) -> StepTimes:
    seconds = typical_phases(measured)
    spreads_s = _spreads_s(np.array([[*(run[phase] for phase in Phase), sum(run.values())] for run in measured]))
    by_phase: dict[str, Any] = {"step_s": sum(seconds.values()), "spread_s": spreads_s[-1]}
    for phase, spread_s in zip(Phase, spreads_s, strict=False):
        by_phase |= {f"{phase}_s": seconds[phase], f"{phase}_spread_s": spread_s, f"{phase}_scale": scales[phase]}
    return StepTimes(iterations=len(measured), **by_phase)


def _layer_times(phases: list[Phase], layers: list[str], runs: Floats) -> tuple[LayerTimes, ...]:
    """Times of the layers with ops in forward or backward, in order; empty if the ops were timed once."""
    if len(runs) < 2:
        return ()
    rows = {layer: row for row, layer in enumerate(dict.fromkeys(layers))}
    sums_s = {phase: np.zeros((len(rows), len(runs))) for phase in Phase}
    for op, (phase, layer) in enumerate(zip(phases, layers, strict=True)):
        sums_s[phase][rows[layer]] += runs[:, op]
    found = []
    for layer, row in rows.items():
        forward, backward = sums_s[Phase.FORWARD][row], sums_s[Phase.BACKWARD][row]
        times = LayerTimes(
            layer=layer,
            forward_s=float(np.median(forward)),
            forward_spread_s=_spreads_s(forward[:, None])[0],
            backward_s=float(np.median(backward)),
            backward_spread_s=_spreads_s(backward[:, None])[0],
        )
        found += [times] if times.forward_s or times.backward_s else []
    return tuple(found)


def _spreads_s(runs: Floats) -> list[float]:
    """Interquartile range of each column, to three digits: a file of many ops stays small."""
    low, high = np.percentile(runs, [25, 75], axis=0)
    return [float(f"{spread:.3g}") for spread in high - low]


def is_doubted(steps: list[PhaseSeconds], instrumented: list[PhaseSeconds]) -> bool:
    """Whether the timed steps may not show the step's time.

    This is so if they spread by more than half of their median (interquartile range), or if their median is more than
    half above that of the ``instrumented`` steps, in which each op was timed: instruments make no step faster. Steps of
    less than 20 ms are never doubted.
    """
    if min(_totals_s(steps) + _totals_s(instrumented)) < JUDGED_S:
        return False
    low_s, high_s = np.percentile(_totals_s(steps), [25, 75])
    median_s = _median_s(steps)
    return bool(high_s - low_s > MUCH * median_s) or median_s > (1 + MUCH) * _median_s(instrumented)


def steady(
    first: list[PhaseSeconds], second: list[PhaseSeconds], instrumented: list[PhaseSeconds]
) -> tuple[list[PhaseSeconds], list[str]]:
    """The timed steps to trust, from a first round that :func:`is_doubted` and a second one; notes give reasons.

    The second round is used if it is not doubted. If it is doubted too, the medians of both are compared. If they
    differ by at most half they agree, and both rounds count. Otherwise the step's time is unknown, and that is an
    error. Rounds of one or two steps are never refused: both count, with a note.

    Raises
    ------
    StepError
        Both rounds, of three steps or more, are doubted, and their medians contradict each other.
    """
    medians_s = sorted((_median_s(first), _median_s(second)))
    said = f"medians of {format_seconds(medians_s[0])} and {format_seconds(medians_s[1])} in two rounds"
    if not is_doubted(second, instrumented):
        return second, [f"timed steps spread too much at first ({said}): those of the second round count"]
    if medians_s[1] <= (1 + MUCH) * medians_s[0] or len(first) < FEWEST_REFUSED:
        return [*first, *second], [f"timed steps spread much ({said}): times are uncertain"]
    raise StepError(
        f"timed steps: expected about equal times, found {said} of {len(first)}, and "
        f"{format_seconds(_median_s(instrumented))} with each op timed; the machine is busy with something else: "
        "profile again when it is quieter, or with more iterations"
    )


def contradicted(steps: list[PhaseSeconds], later: list[PhaseSeconds]) -> str:
    """A note if ``later`` steps, which did no less work, took less than two thirds of the timed ones; else empty.

    On a machine that is busy while all steps are timed, they agree with each other.
    """
    if not later or min(_totals_s(steps) + _totals_s(later)) < JUDGED_S:
        return ""
    found_s, said_s = min(_totals_s(later)), _median_s(steps)
    if said_s <= (1 + MUCH) * found_s:
        return ""
    return (
        f"the timed steps took {format_seconds(said_s)}, and later ones {format_seconds(found_s)}: the machine was "
        "busy with something else, and all times are uncertain; profile again when it is quieter"
    )


def _totals_s(steps: list[PhaseSeconds]) -> list[float]:
    return [sum(step.values()) for step in steps]


def _median_s(steps: list[PhaseSeconds]) -> float:
    return median(_totals_s(steps))
