"""A random program that records in short windows only: whatever a step does, it trains bitwise as in-core.

A few random values are recomputed, the others kept; recording goes on and off where the planner has it, most often
within an op. Nothing meters the steps: a dispatch mode would be handed whole the op in which recording begins. The
steps run twice over, as in ``served_trial.py``.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from poochplan.formats.plan import Decision
from poochplan.planner.problem.problem import Problem, build_problem
from poochplan.planner.schedule.schedule import assemble
from tests.planner.plans import plan_with

from .drawing import Program
from .served_trial import with_layout
from .trial import SERVED, UNMETERED, Outcome, Tried, profiled_or_told, under

DEVICES = (UNMETERED, SERVED)
"""Without an arena, and in one; each has a plan of its own."""
SHARES = (0.1, 0.25, 0.6)
"""How many of the values that can be recomputed are."""


def windowed_trial(program: Program) -> Outcome:
    """Random plans with short windows, each in a session of its own."""
    outcome = Outcome(counts=Counter({"programs": 1}))
    twice = replace(program, events=program.events * 2)
    ready = profiled_or_told(twice, outcome)
    if ready is None:
        return outcome
    profile, reference = ready
    problem = build_problem(profile)
    for turn, device in enumerate(DEVICES):
        decisions = _some_recomputed(problem, 1000 * program.seed + turn)
        tried = Tried(f"windows {turn}", plan_with(profile, assemble(problem, decisions, {})), None, None)
        found = under(twice, with_layout(tried) if device == SERVED else tried, reference, device)
        outcome.counts += found.counts
        outcome.problems += [f"{what} [{program}, {tried.name}, {device}]" for what in found.problems]
    return outcome


def _some_recomputed(problem: Problem, seed: int) -> list[Decision]:
    chance = random.Random(seed)
    share = chance.choice(SHARES)
    return [
        Decision.RECOMPUTE if replay is not None and not must_keep and chance.random() < share else Decision.KEEP
        for replay, must_keep in zip(problem.replay.replays, problem.must_keep, strict=True)
    ]
