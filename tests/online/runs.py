"""Runs of a training: as it is, and with poochplan around it; what each leaves behind, and what it took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import poochplan
from poochplan.runtime.session import Session
from tests.live_bytes import LiveBytes, outside_meter
from tests.runtime.nets import LINK

from .trainings import Training

TURNS = 20
WAITED_AT = 10
"""So many turns are enough to profile every kind of segment; then planning is waited for."""

QUICK: dict[str, Any] = {"time_limit_s": 0.5, "quiet": True, "link": LINK}
"""Options of ``auto``: nothing is measured, and nothing long searched for."""


@dataclass
class Run:
    """``losses`` of each turn, ``state`` afterwards, most live bytes of each turn by the outside meter."""

    losses: list[list[float]]
    state: list[bytes]
    """Of each tensor; as bytes, which do not live beside the run that this one is compared with."""
    peaks: list[int]
    session: Any = None
    """Of ``auto``; it has ended."""
    planned_at: int | None = None
    """The turn before which a plan was first in force."""
    plans: list[int] = field(default_factory=list)
    """How many were in force after each turn: one for each kind of step."""

    @property
    def all_planned_at(self) -> int:
        """The turn before which all plans were in force."""
        return self.plans.index(self.plans[-1]) + 1

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks)

    def equals(self, other: Run) -> bool:
        """Bitwise; a NaN equals itself."""
        mine, theirs = (np.array([loss for turn in run.losses for loss in turn]) for run in (self, other))
        return np.array_equal(mine, theirs, equal_nan=True) and self.state == other.state


def bytes_of(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """What each holds."""
    return [one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for one in tensors]


def run_plain(make: Callable[[], Training], turns: int = TURNS, *, is_metered: bool = True) -> Run:
    """Without poochplan."""
    torch.manual_seed(0)
    training, run = make(), Run([], [], [])
    with outside_meter() if is_metered else nullcontext() as meter:
        for number in range(turns):
            turn(training, number, run, meter)
    run.state = bytes_of(training.state())
    return run


def turn(training: Training, number: int, run: Run, meter: LiveBytes | None) -> None:
    """One turn, noted in ``run``. A meter is a mode; loops whose gradients depend on modes have none."""
    if meter is not None:
        meter.restart()
    run.losses.append(list(training.turn(number)))
    run.peaks.append(meter.peak if meter is not None else 0)


def opened(training: Training, cache: Path, **options: Any) -> Session:
    """A session of ``auto`` for its loop."""
    options = {"budget": "60%", "cache": cache, **QUICK, **options}
    return poochplan.auto(training.models, training.optimizers, **options)


def planning(training: Training, cache: Path, **options: Any) -> Session:
    """A session that has just begun to plan."""
    session = opened(training, cache, **options)
    session.__enter__()
    for number in range(12):
        training.turn(number)
        kinds = session._source.loop.kinds
        if kinds and all(kind.next_observer is None for kind in kinds.values()):
            break
    session._attachment.settle()
    return session


def run_auto(
    make: Callable[[], Training],
    budget: int | str,
    cache: Path,
    turns: int = TURNS,
    *,
    look: Callable[[Session], object] = lambda session: None,
    is_metered: bool = True,
    **options: Any,
) -> Run:
    """With ``auto`` around the loop, as a user would. ``look`` is given the session behind each turn."""
    torch.manual_seed(0)
    training, run = make(), Run([], [], [])
    with (
        outside_meter() if is_metered else nullcontext() as meter,
        opened(training, cache, budget=budget, **options) as session,
    ):
        run.session = session
        for number in range(turns):
            turn(training, number, run, meter)
            if run.planned_at is None and session.plan is not None:
                run.planned_at = number
            run.plans.append(len(session.plans))
            look(session)
            if number >= WAITED_AT:
                session.wait_until_planned(120)
    run.state = bytes_of(training.state())
    return run
