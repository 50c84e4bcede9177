"""A random program that records in short windows only: whatever a step does, it trains bitwise as in-core.

A few random values are recomputed, the others kept; recording goes on and off where the planner has it, most often
within an op. Nothing meters the steps: a dispatch mode would be handed whole the op in which recording begins. The
steps run twice over, as in ``served_trial.py``.
"""

from __future__ import annotations

import random
from dataclasses import replace

from poochplan.formats.plan import Decision
from poochplan.planner.simulator.problem import Problem, build_problem
from poochplan.planner.simulator.schedule import assemble
from tests.planner.plans import plan_with

from .drawing import Program
from .network import Running
from .served_trial import with_layout
from .training import Snapshot, train
from .trial import SERVED, UNMETERED, Outcome, Run, Tried, profile_of, trial_of

DEVICES = (UNMETERED, SERVED)
"""Without an arena, and in one; each has a plan of its own."""
SHARES = (0.1, 0.25, 0.6)
"""How many of the values that can be recomputed are."""


def windowed_trial(program: Program) -> Outcome:
    """Random plans with short windows, each in a session of its own."""
    return trial_of(replace(program, events=program.events * 2), _windowed)


def _windowed(program: Program) -> tuple[list[Run], list[Snapshot]]:
    profile, runs = profile_of(program), []
    problem = build_problem(profile)
    for turn, device in enumerate(DEVICES):
        decisions = _some_recomputed(problem, 1000 * program.seed + turn)
        tried = Tried(f"windows {turn}", plan_with(profile, assemble(problem, decisions, {})), None, None)
        runs.append((with_layout(tried) if device == SERVED else tried, device))
    return runs, train(Running(program))


def _some_recomputed(problem: Problem, seed: int) -> list[Decision]:
    chance = random.Random(seed)
    share = chance.choice(SHARES)
    return [
        Decision.RECOMPUTE if replay is not None and not must_keep and chance.random() < share else Decision.KEEP
        for replay, must_keep in zip(problem.replay.replays, problem.must_keep, strict=True)
    ]
