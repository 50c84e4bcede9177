"""What ``benchmarks/full_volume.py`` found, as tables: for its ``--table``, the page of figures and the notebook."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, median
from typing import Any

from benchmarks.volume_cases import CLASSES
from benchmarks.volume_training import METHODS, Method, seconds_to

SCORES = (0.75, 0.80, 0.85)
"""Of which the seconds are told: means of the classes' Dice over the held-out cases. Set before the run."""
_NAMED = tuple(enumerate(CLASSES[1:]))
_MIB = 1 << 20
Row = dict[str, Any]


def runs_of(found: Row, method: Method) -> list[Row]:
    """The trainings of one way, by seed."""
    return sorted((run for run in found["runs"] if run["method"] == method), key=lambda run: run["seed"])


def held_out_dice(run: Row) -> list[float]:
    """Of each class, the mean over the held-out cases at the end."""
    return [mean(scores) for scores in zip(*run["held_out"].values(), strict=True)]


def differences(found: Row, score: Callable[[Row], float]) -> list[float]:
    """Whole less patches, of each seed."""
    pairs = zip(*(runs_of(found, method) for method in METHODS), strict=True)
    return [score(whole) - score(patches) for patches, whole in pairs]


def summary(found: Row) -> list[tuple[str, str, str, str]]:
    """Rows of what was measured: its name, patches, whole, and whole less patches of each seed where that says more.

    Mean over the seeds, then the least and the most in brackets.
    """
    rows = [_spread(found, f"Dice of {name}, held-out copies", held_out_dice, at) for at, name in _NAMED]
    rows.append(_spread(found, "Dice, mean of both", lambda run: [mean(held_out_dice(run))], 0))
    rows += [
        _spread(found, f"Dice of {name}, other scanner", lambda run: run["other_scanner"], at) for at, name in _NAMED
    ]
    for score in SCORES:
        rows.append((f"CPU seconds to a mean Dice of {score:.2f}, each seed", *_seconds(found, score), ""))
    rows += [
        _each(found, "steps", lambda runs: f"{mean(run['steps'] for run in runs):,.0f}"),
        _each(found, "CPU seconds of a step, median", lambda runs: f"{median(r['median_step_s'] for r in runs):.3f}"),
        _each(found, "peak in training, MiB", lambda runs: f"{_most(runs, 'peak_bytes'):.2f}"),
        _each(found, "peak of predicting one volume, MiB", lambda runs: f"{_most(runs, 'predicting_peak_bytes'):.2f}"),
        _each(
            found, "CPU seconds to predict one volume", lambda runs: f"{median(r['predicting_s'] for r in runs):.2f}"
        ),
    ]
    in_core = found["in_core_peak_bytes"]
    patches, whole = (f"{in_core[method] / _MIB:.2f}" for method in METHODS)
    return [*rows, ("peak in-core, MiB", patches, whole, "")]


def _spread(found: Row, name: str, scores: Callable[[Row], list[float]], at: int) -> tuple[str, str, str, str]:
    cells = [[scores(run)[at] for run in runs_of(found, method)] for method in METHODS]
    shown = [f"{mean(cell):.3f} ({min(cell):.3f} to {max(cell):.3f})" for cell in cells]
    return (
        name,
        shown[0],
        shown[1],
        ", ".join(f"{100 * less:+.1f}" for less in differences(found, lambda run: scores(run)[at])),
    )


def _seconds(found: Row, score: float) -> tuple[str, str]:
    shown = []
    for method in METHODS:
        each = [seconds_to(run["looks"], score) for run in runs_of(found, method)]
        shown.append(", ".join("never" if found_s is None else f"{found_s:.0f}" for found_s in each))
    return shown[0], shown[1]


def _each(found: Row, name: str, cell: Callable[[list[Row]], str]) -> tuple[str, str, str, str]:
    patches, whole = (cell(runs_of(found, method)) for method in METHODS)
    return name, patches, whole, ""


def _most(runs: list[Row], name: str) -> float:
    return max(float(run[name]) for run in runs) / _MIB


def lines(found: Row) -> list[str]:
    """A Markdown table of the :func:`summary`."""
    head = "| measured | patches, in-core | whole, planned | whole less patches, hundredths, each seed |"
    return [head, "|---|---|---|---|", *(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in summary(found))]
