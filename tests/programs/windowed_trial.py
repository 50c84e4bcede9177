"""A random program whose steps are recorded in random windows: whatever a step does, it trains bitwise as in-core.

No planner made these plans. Recording goes on and off at any save point, most often within an op; so what is to be
recomputed often cannot be, and is swapped. Nothing meters the steps: a dispatch mode would be handed whole the op in
which recording begins. The steps run twice over, as in ``served_trial.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tests.runtime.random_plans import random_plan, windowed

from .drawing import Program
from .served_trial import with_layout
from .trial import SERVED, UNMETERED, WEIGHTS, Outcome, Tried, profiled_or_told, under

PLANS = ((WEIGHTS[2], UNMETERED), (WEIGHTS[3], SERVED))
"""What each is drawn from, and where it is tried: without an arena, and in one."""


def windowed_trial(program: Program) -> Outcome:
    """Random plans with random windows, each in a session of its own."""
    outcome = Outcome(counts=Counter({"programs": 1}))
    twice = replace(program, events=program.events * 2)
    ready = profiled_or_told(twice, outcome)
    if ready is None:
        return outcome
    profile, reference = ready
    for turn, (weights, device) in enumerate(PLANS):
        seed = 1000 * program.seed + turn
        tried = Tried(f"windows {turn}", windowed(random_plan(profile, seed, weights), seed), None, None)
        found = under(twice, with_layout(tried) if device == SERVED else tried, reference, device)
        outcome.counts += found.counts
        outcome.problems += [f"{problem} [{program}, {tried.name}, {device}]" for problem in found.problems]
    return outcome
