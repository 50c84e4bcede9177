"""Other trials of random programs: with casts, served from an arena, and recorded in short windows.

Whatever a step does, it trains bitwise as in-core. Where steps are not all like the planned one, they run twice over,
so that those which are not come behind some that are served.
"""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec

from poochplan.formats.plan import Decision, Layout
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES
from poochplan.planner.policies import PolicyInput
from poochplan.planner.search.optimise import Optimum
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import assemble
from poochplan.planner.simulator.simulate import STYLES, try_style
from poochplan.planner.simulator.sources import with_sources
from poochplan.planner.writing import write_plan
from tests.planner.plans import plan_with, random_decisions

from .drawing import Block, Program
from .training import Running, Snapshot, train
from .trial import DEVICES, SERVED, UNMETERED, Outcome, Run, Tried, prepared, profile_of, trial_of

CASTING = ("normed in 32 bits", "normed in 32 bits", "repeated", "narrow written later")
SHARES = (0.0, 0.6, 0.9)
"""Of the in-core peak: budgets for which decisions about sources are scheduled."""
RECOMPUTED = (0.1, 0.25, 0.6)
"""Of the values that can be recomputed: how many are, in short windows."""
ANY_BYTES = 1 << 40


def cast_trial(program: Program) -> Outcome:
    """Plans that hold what casts and clones read in place of their results."""
    return trial_of(with_casts(program), _held)


def with_casts(program: Program) -> Program:
    """The program with two or three blocks with casts more."""
    chance, blocks = random.Random(f"casts {program.seed}"), list(program.blocks)
    for kind in chance.sample(CASTING, chance.choice((2, 3))):
        blocks.insert(chance.randint(0, len(blocks)), Block(kind))
    return replace(program, blocks=tuple(blocks))


def _held(program: Program) -> tuple[list[Run], list[Snapshot]]:
    """Random decisions about values and sources, each in a session of its own, on both devices."""
    profile, runs = with_sources(profile_of(program)), list[Run]()
    given = PolicyInput(Problem.of(profile), 1 << 40)
    problem = Problem.of(profile)
    for turn, (share, style) in enumerate(zip(SHARES, STYLES, strict=True)):
        wish = random_decisions(problem, 10 * program.seed + turn)
        found = try_style(problem, "random", wish, int(share * profile.in_core_peak_bytes), style)
        plan = write_plan(given, Optimum(found, "random"), 0.0, is_laid_out=False)
        foreseen = found.simulation
        tried = Tried(f"sources {turn}", plan, foreseen.first_step_peak_bytes, foreseen.peak_bytes)
        runs += [(tried, device) for device in DEVICES]
    return runs, train(Running(program))


def served_trial(program: Program) -> Outcome:
    """Every plan of the program, in a session that serves from an arena.

    The smallest blocks lie in it too, and it may be of any size: places are what is tried here, not budgets.
    """

    def served(program: Program) -> tuple[list[Run], list[Snapshot]]:
        plans, reference = prepared(program)
        return [(_with_layout(tried), SERVED) for tried in plans], reference

    return trial_of(replace(program, events=program.events * 2), served)


def _with_layout(tried: Tried) -> Tried:
    """The plan with room for any arena, which a step of its own lays out."""
    layout = Layout(arena_bytes=0, least_bytes=LEAST_COUNTED_BYTES, places=())
    prediction = msgspec.structs.replace(tried.plan.prediction, arena_bytes=0, arena_peak_bytes=0)
    plan = msgspec.structs.replace(tried.plan, layout=layout, prediction=prediction, budget_bytes=ANY_BYTES)
    return replace(tried, plan=plan)


def windowed_trial(program: Program) -> Outcome:
    """Plans that recompute a few random values, without an arena and in one.

    Recording goes on and off where the planner has it, most often within an op. Nothing meters the steps: a dispatch
    mode would be handed whole the op in which recording begins.
    """
    return trial_of(replace(program, events=program.events * 2), _windowed)


def _windowed(program: Program) -> tuple[list[Run], list[Snapshot]]:
    profile, runs = profile_of(program), []
    problem = Problem.of(profile)
    for turn, device in enumerate((UNMETERED, SERVED)):
        decisions = _some_recomputed(problem, 1000 * program.seed + turn)
        tried = Tried(f"windows {turn}", plan_with(profile, assemble(problem, decisions, {})), None, None)
        runs.append((_with_layout(tried) if device == SERVED else tried, device))
    return runs, train(Running(program))


def _some_recomputed(problem: Problem, seed: int) -> list[Decision]:
    chance = random.Random(seed)
    share = chance.choice(RECOMPUTED)
    return [
        Decision.RECOMPUTE if replay is not None and not must_keep and chance.random() < share else Decision.KEEP
        for replay, must_keep in zip(problem.replay.replays, problem.must_keep, strict=True)
    ]
