"""A random program whose blocks begin to write late, whose layers are drawn, whose log is held: under the audit.

Each step begins from the same weights, because the programs do not learn: so a step is wrong by itself, or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.runtime.metering.census import leave_out, live
from poochplan.runtime.session import Session

from .drawing import LAYERS_DRAWN, PLAIN, Block, Program
from .late_writes import LATE
from .training import Running, Snapshot, differences, train
from .trial import Outcome, prepared, quietly

MOST_STEPS = 60
"""With late writes."""
DRAWN = 0.3
"""Of the steps of a program that has such."""


def with_late(program: Program) -> Program:
    """The program with two blocks that write late; some draw their layers or hold a log."""
    chance, blocks = random.Random(f"late {program.seed}"), list(program.blocks)
    for kind in chance.sample(LATE, 2):
        blocks.insert(chance.randint(0, len(blocks)), Block(kind))
    draws, logs = chance.random() < 0.4, chance.random() < 0.4
    late = [LAYERS_DRAWN if draws and chance.random() < DRAWN else PLAIN for _ in range(MOST_STEPS)]
    late_from = len(program.events)
    return replace(
        program, blocks=tuple(blocks), events=(*program.events, *late), late_from=late_from, logs=logs, learns=False
    )


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
        judge = _Judge(outcome, program, session, plan)
        try:
            seen = train(running, judge)
        except Exception as error:
            outcome.problems.append(f"raises {error!r}")
            return outcome
    for step, (wanted, found) in enumerate(zip(reference, seen, strict=True)):
        judge.judge(step, differences([wanted], [found]))
    return outcome


class _Judge:
    """Told of each step when it has ended; behind the last, of what differs in each."""

    def __init__(self, outcome: Outcome, program: Program, session: Session, plan: Plan) -> None:
        self._outcome, self._program, self._session = outcome, program, session
        self._bound = sum(value.decision is not Decision.KEEP for value in plan.values)
        self._audited, self._told, self._differed = {False: 0, True: 0}, list[bool](), 0
        self._silent_ok = list[bool]()

    def __call__(self, index: int, event: str) -> None:
        report = self._session.report()
        late_from = self._program.late_from
        assert late_from is not None
        left_out = event == LAYERS_DRAWN
        self._silent_ok.append(self._audited[left_out] < self._bound and index >= late_from)
        self._audited[left_out] += index >= late_from and report.last_step.audited_values > 0
        self._told.append(report.total.audit_differences > self._differed)
        self._differed = report.total.audit_differences
        self._outcome.counts["steps"] += 1
        self._outcome.counts["steps audited"] += report.last_step.audited_values > 0
        self._outcome.counts["steps told"] += self._told[-1]

    def judge(self, step: int, wrong: list[str]) -> None:
        if not wrong:
            return
        is_gradient = all(one.startswith("gradient ") for one in wrong)
        self._outcome.counts["steps that differ"] += 1
        if is_gradient and (self._told[step] or self._silent_ok[step]):
            return
        self._outcome.problems += [f"{one}, step {step} ({self._program.events[step]})" for one in wrong]
