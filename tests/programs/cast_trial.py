"""A random program with casts and clones, under plans that hold what was copied in place of the copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from poochplan.formats.profile import Profile
from poochplan.formats.sources import with_sources
from poochplan.planner.policies import PolicyInput
from poochplan.planner.search.optimise import Optimum
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.simulate import STYLES, try_style
from poochplan.planner.writing import write_plan
from tests.planner.plans import random_decisions

from .drawing import Block, Program
from .network import Running
from .training import Snapshot, train
from .trial import DEVICES, Outcome, Run, Tried, profile_of, trial_of

CASTING = ("normed in 32 bits", "normed in 32 bits", "repeated", "narrow written later")
SHARES = (0.0, 0.6, 0.9)
"""Of the in-core peak: budgets for which decisions are scheduled."""


def cast_trial(program: Program) -> Outcome:
    """Random decisions about its values and sources, each in a session of its own, on both devices."""
    return trial_of(with_casts(program), partial(held, completed=with_sources))


def with_casts(program: Program) -> Program:
    """The program with two or three blocks more."""
    chance, blocks = random.Random(f"casts {program.seed}"), list(program.blocks)
    for kind in chance.sample(CASTING, chance.choice((2, 3))):
        blocks.insert(chance.randint(0, len(blocks)), Block(kind))
    return replace(program, blocks=tuple(blocks))


def held(program: Program, completed: Callable[[Profile], Profile]) -> tuple[list[Run], list[Snapshot]]:
    """Runs of random plans for the profile that ``completed`` returns, and the steps in-core."""
    profile, runs = completed(profile_of(program)), list[Run]()
    given = PolicyInput.of(profile, 1 << 40)
    problem = build_problem(profile)
    for turn in range(3):
        budget_bytes = int(SHARES[turn] * profile.in_core_peak_bytes)
        wish = random_decisions(problem, 10 * program.seed + turn)
        found = try_style(problem, "random", wish, budget_bytes, STYLES[turn])
        plan = write_plan(given, Optimum(found, "random"), 0.0, is_laid_out=False)
        foreseen = found.simulation
        tried = Tried(f"sources {turn}", plan, foreseen.first_step_peak_bytes, foreseen.peak_bytes)
        runs += [(tried, device) for device in DEVICES]
    return runs, train(Running(program))
