"""Steadiness: whether timed steps say how long the step takes, or how busy the machine was meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np

from poochplan.errors import StepError
from poochplan.units import format_seconds

from .reconcile import PhaseSeconds

JUDGED_S = 0.02
"""Where any step took less than this nothing is judged: one stumble of the machine is more than such a step."""
FEWEST_REFUSED = 3
"""Rounds of fewer steps have no spread: what they say may be uncertain, and is never refused."""
MUCH = 0.5
"""Share of a step by which times contradict each other. Ordinary noise of a shared machine stays below it."""


class Timed(NamedTuple):
    """The steps to go by, and a note where they were timed twice."""

    steps: list[PhaseSeconds]
    notes: list[str]


def steady(
    first: list[PhaseSeconds], instrumented: list[PhaseSeconds], again: Callable[[], list[PhaseSeconds]]
) -> Timed:
    """The timed steps that can be believed: the first round, a second one by ``again``, or both together.

    A round is doubted when its steps spread by more than half of their median (interquartile range), or when their
    median is more than half above that of the ``instrumented`` steps, in which each op was timed: instruments make no
    step faster. A doubted round is repeated once, and the second is taken where it is not doubted. Where it is, too,
    the medians of both are set against each other: within half of each other they say the same, and count together.
    Otherwise nothing is known of the step, and that is an error. Steps of less than 20 ms are never doubted, and rounds
    of one or two steps are never refused: they count together, with a note.

    Raises
    ------
    StepError
        Both rounds, of three steps or more, are doubted, and their medians contradict each other.
    """
    if not _is_doubted(first, instrumented):
        return Timed(first, [])
    second = again()
    medians_s = sorted((_median_s(first), _median_s(second)))
    said = f"medians of {format_seconds(medians_s[0])} and {format_seconds(medians_s[1])} in two rounds"
    if not _is_doubted(second, instrumented):
        return Timed(second, [f"timed steps spread too much at first ({said}): those of the second round count"])
    if medians_s[1] <= (1 + MUCH) * medians_s[0] or len(first) < FEWEST_REFUSED:
        return Timed([*first, *second], [f"timed steps spread much ({said}): times are uncertain"])
    raise StepError(
        f"timed steps: expected steps of about one length, found {said} of {len(first)}, and "
        f"{format_seconds(_median_s(instrumented))} with each op timed; the machine is busy with something else: "
        "profile again when it is quieter, or with more iterations"
    )


def contradicted(steps: list[PhaseSeconds], later: list[PhaseSeconds]) -> str:
    """A note where steps that ran ``later``, and did no less, took less than two thirds of the timed ones; else empty.

    A machine that is busy as long as steps are timed makes them agree with each other.
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


def _is_doubted(steps: list[PhaseSeconds], instrumented: list[PhaseSeconds]) -> bool:
    if min(_totals_s(steps) + _totals_s(instrumented)) < JUDGED_S:
        return False
    low_s, high_s = np.percentile(_totals_s(steps), [25, 75])
    median_s = _median_s(steps)
    return bool(high_s - low_s > MUCH * median_s) or median_s > (1 + MUCH) * _median_s(instrumented)


def _totals_s(steps: list[PhaseSeconds]) -> list[float]:
    return [sum(step.values()) for step in steps]


def _median_s(steps: list[PhaseSeconds]) -> float:
    return median(_totals_s(steps))
