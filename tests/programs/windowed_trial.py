"""A random program whose steps are recorded in random windows: whatever a step does, it trains bitwise as in-core.

No planner made these plans. Recording goes on and off at any save point, most often within an op; so what is to be
recomputed often cannot be, and is swapped. Nothing meters the steps: a dispatch mode would be handed whole the op in
which recording begins. Each plan is tried without an arena, and the first one served from an arena too, where the steps
run twice over as in ``served_trial.py``.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import msgspec

from poochplan.formats.plan import Plan, PointActions
from tests.runtime.random_plans import random_plan

from .drawing import Program
from .served_trial import with_layout
from .trial import SERVED, UNMETERED, WEIGHTS, Outcome, Tried, profiled_or_told, under

DRAWN_FROM = (WEIGHTS[2], WEIGHTS[0], WEIGHTS[3])
"""Of each plan."""
SWITCHES = (0.15, 0.4, 0.8)
"""At how many of the save points recording goes on or off."""


def windowed_trial(program: Program) -> Outcome:
    """Some random plans with random windows, unmetered; the first of them also served from an arena."""
    outcome = Outcome(counts=Counter({"programs": 1}))
    twice = replace(program, events=program.events * 2)
    ready = profiled_or_told(twice, outcome)
    if ready is None:
        return outcome
    profile, reference = ready
    once = reference[: len(program.events)]
    for turn, weights in enumerate(DRAWN_FROM):
        seed = 1000 * program.seed + turn
        tried = Tried(f"windows {turn}", windowed(random_plan(profile, seed, weights), seed), None, None)
        runs = [(program, tried, once, UNMETERED)]
        runs += [(twice, with_layout(tried), reference, SERVED)] if not turn else []
        for run in runs:
            found = under(*run)
            outcome.counts += found.counts
            outcome.problems += [f"{problem} [{program}, {tried.name}, {run[-1]}]" for problem in found.problems]
    return outcome


def windowed(plan: Plan, seed: int) -> Plan:
    """The plan with recording switched on and off at random save points."""
    chance = random.Random(seed)
    share, is_on = chance.choice(SWITCHES), chance.random() < 0.5
    points = {(actions.at, actions.index): actions for actions in plan.schedule}
    plan = msgspec.structs.replace(plan, record_from_start=is_on)
    for index in range(len(plan.values)):
        if chance.random() < share:
            is_on = not is_on
            actions = points.get(("save", index)) or PointActions(at="save", index=index)
            points["save", index] = msgspec.structs.replace(actions, record="on" if is_on else "off")
    ordered = sorted(points, key=lambda point: (point[0] == "use", point[1]))
    return msgspec.structs.replace(plan, schedule=tuple(points[point] for point in ordered))
