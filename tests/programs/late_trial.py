"""A random program whose blocks begin to write late, whose layers are drawn, whose log is held: under the audit.

Each step begins from the same weights, because the programs do not learn: so a step is wrong by itself, or not at all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.runtime.metering.census import leave_out, live
from poochplan.runtime.session import Session

from .drawing import LAYERS_DRAWN, PLAIN, Block, Program
from .late_writes import LATE
from .training import WRITES, Running, Snapshot, differences, train
from .trial import Outcome, prepared, quietly

MOST_STEPS = 60
"""With late writes."""
DRAWN = 0.3
"""Of the steps of a program that has such."""


Place = tuple[int, int, int]
"""The block before, a block, and the save point that the session has come to."""
START: Place = (-1, -1, 0)


def with_late(program: Program) -> Program:
    """The program with two blocks that write late; some draw their layers or hold a log."""
    chance, blocks = random.Random(f"late {program.seed}"), list(program.blocks)
    for kind in chance.sample(LATE, 2):
        blocks.insert(chance.randint(0, len(blocks)), Block(kind))
    draws, logs = chance.random() < 0.4, chance.random() < 0.4
    before = [event for event in program.events if event != WRITES]  # an error in-core too
    late = [LAYERS_DRAWN if draws and chance.random() < DRAWN else PLAIN for _ in range(MOST_STEPS)]
    events = (*before, *late)
    return replace(program, blocks=tuple(blocks), events=events, late_from=len(before), logs=logs, learns=False)


def late_trial(program: Program) -> Outcome:
    """Random plans and the planner's, with an audit that keeps beside, and with one that compares checksums."""
    program, outcome = with_late(program), Outcome()
    outcome.counts["programs"] += 1
    try:
        plans, reference = prepared(program)
    except Exception as error:
        outcome.problems.append(f"not prepared: {error!r} [{program}]")
        return outcome
    for number, tried in enumerate((plans[0], plans[-1])):
        with quietly():
            found = _under(program, tried.plan, reference, has_room=(program.seed + number) % 2 == 0)
        outcome.counts += found.counts
        outcome.problems += [f"{problem} [{program}, {tried.name}]" for problem in found.problems]
    return outcome


def _under(program: Program, plan: Plan, reference: Sequence[Snapshot], *, has_room: bool) -> Outcome:
    outcome, running = Outcome(), Running(program)
    outcome.counts["runs"] += 1
    leave_out(live(torch.Tensor))
    with poochplan.apply(plan, running.model, arena="off", meter="first-steps" if has_room else "never") as session:
        if program.announces:
            running.announce = session.step
        judge = _Judge(outcome, running, session, plan)
        try:
            seen = train(running, judge)
        except Exception as error:
            outcome.problems.append(f"raises {error!r}")
            return outcome
    for step, (wanted, found) in enumerate(zip(reference, seen, strict=True)):
        judge.judge(step, differences([wanted], [found]))
    return outcome


class _Judge:
    """Told of each step when it has ended; behind the last, of what differs in each.

    A step may differ until each of its blocks, from the first that writes on, has run often enough where it runs:
    behind that block, and at that save point. Steps that left their plan have a bound of their own.
    """

    def __init__(self, outcome: Outcome, running: Running, session: Session, plan: Plan) -> None:
        self._outcome, self._program, self._session = outcome, running.program, session
        self._released = sum(value.decision is not Decision.KEEP for value in plan.values)
        self._most_diverged = 2 * len(plan.values)
        self._steps, self._diverged, self._differed = Counter[Place](), 0, 0
        self._may_differ, self._path = list[bool](), [START]
        for number, block in enumerate(running.model.blocks):
            block.register_forward_pre_hook(partial(self._runs, number))

    def _runs(self, number: int, *_: object) -> None:
        self._path.append((self._path[-1][1], number, self._session._engine.segment.saves))

    def _is_in_bound(self) -> bool:
        """Whether some block of the step has not run often enough where it runs. Counts these places."""
        late = [number for number, block in enumerate(self._program.blocks) if block.kind in LATE]
        places = [*self._path, (self._path[-1][1], len(self._program.blocks), 0)]
        first = next((at for at, place in enumerate(places) if place[1] in late), len(places))
        is_in_bound = any(self._steps[place] < self._released for place in places[first:])
        self._steps.update(set(places))
        return is_in_bound

    def __call__(self, index: int, event: str) -> None:
        late_from, counts = self._program.late_from, self._outcome.counts
        assert late_from is not None
        report, segment = self._session.report(), self._session._engine.segment
        kind = "diverged" if segment.diverged else "layers left out" if segment.left_out else "whole"
        is_told = report.total.audit_differences > self._differed
        self._differed = report.total.audit_differences
        if index < late_from:
            self._may_differ.append(False)
        elif segment.diverged:
            self._may_differ.append(is_told or self._diverged < self._most_diverged)
            self._diverged += 1
        else:
            self._may_differ.append(self._is_in_bound() or is_told)
        self._path = [START]
        if is_told:  # what is kept from now on may change what the replays of others give
            self._steps.clear()
            self._diverged = 0
        counts["steps"] += 1
        counts[f"steps {kind}"] += 1
        counts["steps audited"] += report.last_step.audited_values > 0
        counts["steps told"] += is_told

    def judge(self, step: int, wrong: list[str]) -> None:
        counts = self._outcome.counts
        counts["steps that differ"] += bool(wrong)
        if all(one.startswith("gradient ") for one in wrong) and self._may_differ[step]:
            return
        self._outcome.problems += [f"{one}, step {step} ({self._program.events[step]})" for one in wrong]
