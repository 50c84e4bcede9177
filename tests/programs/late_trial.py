"""A random program whose blocks begin to write late, whose layers are drawn, whose log is held: under the audit.

Each step begins from the same weights, because the programs do not learn: so a step is wrong by itself, or not at all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

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
    """Told of each step when it has ended; behind the last, of what differs in each.

    Steps that left layers out, and those that left their plan, have bounds of their own.
    """

    def __init__(self, outcome: Outcome, program: Program, session: Session, plan: Plan) -> None:
        self._outcome, self._program, self._session = outcome, program, session
        released = sum(value.decision is not Decision.KEEP for value in plan.values)
        self._bounds = {"whole": released, "layers left out": released, "diverged": 2 * len(plan.values)}
        self._steps, self._differed = Counter[str](), 0
        self._may_differ = list[bool]()

    def __call__(self, index: int, event: str) -> None:
        late_from, counts = self._program.late_from, self._outcome.counts
        assert late_from is not None
        report, segment = self._session.report(), self._session._engine.segment
        kind = "diverged" if segment.diverged else "layers left out" if segment.left_out else "whole"
        is_told = report.total.audit_differences > self._differed
        self._differed = report.total.audit_differences
        self._may_differ.append(index >= late_from and (is_told or self._steps[kind] < self._bounds[kind]))
        self._steps[kind] += index >= late_from
        if is_told:  # what is kept from now on may change what the replays of others give
            self._steps.clear()
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
