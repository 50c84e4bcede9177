"""What ``benchmarks/full_volume.py`` found, as tables: for its ``--table``, the page of figures and the notebook."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, median

from benchmarks.facts import MIB, Row
from benchmarks.volume_cases import CLASSES
from benchmarks.volume_training import METHODS, Method, seconds_to

SCORES = (0.75, 0.80, 0.85)
"""Of which the seconds are told: means of the classes' Dice over the held-out cases. Set before the run."""
_NAMED = tuple(enumerate(CLASSES[1:]))


def runs_of(found: Row, method: Method) -> list[Row]:
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

    def each(name: str, cell: Callable[[list[Row]], str]) -> tuple[str, str, str, str]:
        patches, whole = (cell(runs_of(found, method)) for method in METHODS)
        return name, patches, whole, ""

    def spread(name: str, score: Callable[[Row], float]) -> tuple[str, str, str, str]:
        def cell(runs: list[Row]) -> str:
            scores = [score(run) for run in runs]
            return f"{mean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})"

        return (*each(name, cell)[:3], ", ".join(f"{100 * less:+.1f}" for less in differences(found, score)))

    def seconds(score: float) -> Callable[[list[Row]], str]:
        def cell(runs: list[Row]) -> str:
            reached = (seconds_to(run["looks"], score) for run in runs)
            return ", ".join("never" if found_s is None else f"{found_s:.0f}" for found_s in reached)

        return cell

    def most(name: str) -> Callable[[list[Row]], str]:
        return lambda runs: f"{max(float(run[name]) for run in runs) / MIB:.2f}"

    patches, whole = (f"{found['in_core_peak_bytes'][method] / MIB:.2f}" for method in METHODS)
    return [
        *(spread(f"Dice of {name}, held-out copies", lambda run, at=at: held_out_dice(run)[at]) for at, name in _NAMED),
        spread("Dice, mean of both", lambda run: mean(held_out_dice(run))),
        *(spread(f"Dice of {name}, other scanner", lambda run, at=at: run["other_scanner"][at]) for at, name in _NAMED),
        *(each(f"CPU seconds to a mean Dice of {score:.2f}, each seed", seconds(score)) for score in SCORES),
        each("steps", lambda runs: f"{mean(run['steps'] for run in runs):,.0f}"),
        each("CPU seconds of a step, median", lambda runs: f"{median(run['median_step_s'] for run in runs):.3f}"),
        each("peak in training, MiB", most("peak_bytes")),
        each("peak of predicting one volume, MiB", most("predicting_peak_bytes")),
        each("CPU seconds to predict one volume", lambda runs: f"{median(run['predicting_s'] for run in runs):.2f}"),
        ("peak in-core, MiB", patches, whole, ""),
    ]


def lines(found: Row) -> list[str]:
    head = "| measured | patches, in-core | whole, planned | whole less patches, hundredths, each seed |"
    return [head, "|---|---|---|---|", *(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in summary(found))]
