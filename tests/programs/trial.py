"""A random program under plans, on two devices: bitwise as in-core, and never above what was predicted."""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.planner.planning import smallest_budget
from poochplan.planner.simulator.problem import Problem
from poochplan.planner.simulator.schedule import schedule_of
from poochplan.planner.simulator.simulate import simulate
from poochplan.runtime.metering.census import leave_out, live
from poochplan.runtime.run_report import FallbackKind, StepReport
from poochplan.runtime.session import Session
from tests.runtime.adversarial import AdversarialDevice, OpClock
from tests.runtime.nets import LINK
from tests.runtime.random_plans import random_plan

from .drawing import ABANDONED, FOLLOWED, LEAVES_SOMETHING, PLAIN, SAME_STEP, WITHOUT_BACKWARD, Feature, Program
from .training import REPLAYED, WRITES, Running, Snapshot, differences, first_step, train

FAILING, SERVED, UNMETERED = "failing", "served", "unmetered"
DEVICES = ("cpu", "adversarial")
"""And the adversarial one whose first copies fail, for the first step under one plan; ``SERVED`` is the CPU with an
arena, ``UNMETERED`` the CPU without one; in neither does a dispatch mode see the ops of a whole step."""
WEIGHTS = ((1, 2, 2), (0, 1, 0), (0, 0, 1), (1, 1, 3), (0, 2, 1))
"""What random plans draw from: keep, swap, recompute. The first always, and two of the others."""
KINDS = {
    "wrong gradients": ("gradient ",),
    "wrong parameters": ("parameter ",),
    "wrong buffers": ("buffer ",),
    "wrong generator states": ("generator",),
    "wrong losses or states": ("loss ", "state "),
    "peaks above the prediction": ("peak ",),
    "steps that do not follow the plan": ("does not follow",),
    "errors": ("raises ", "not prepared"),
}
"""Kinds of problems by what they begin with; the adversarial device has its own: unsafe copies."""
EVALUATIONS = 20
TIGHT = 0.1
"""The planner's budget: so much of the way from the smallest to the in-core peak."""
LIMIT = "an input of the replay was written in place since it was read"
"""Documented: so ends a step that writes what a replay reads. For a saved tensor in-core is an error too, perhaps of
another node."""


@dataclass(frozen=True)
class Tried:
    """A plan, and the most bytes that the first step and the later ones take; None where it cannot be followed."""

    name: str
    plan: Plan
    first_peak_bytes: int | None
    peak_bytes: int | None


Run = tuple[Tried, str]
"""And the device."""


@dataclass
class Outcome:
    """What the trial of one program has found."""

    problems: list[str] = field(default_factory=list)
    """Each begins with its kind: see :data:`KINDS`."""
    counts: Counter[str] = field(default_factory=Counter)


def prepared(program: Program) -> tuple[list[Tried], list[Snapshot]]:
    """The plans of a program, and what its steps give in-core."""
    with quietly():
        profile = profile_of(program)
        weights = [WEIGHTS[0], *(WEIGHTS[1 + (program.seed + turn) % 4] for turn in (0, 1))]
        problem = Problem.of(profile)
        plans = [_random(profile, problem, program.seed + index, some) for index, some in enumerate(weights)]
        smallest = smallest_budget(profile)
        budget_bytes = smallest + int(TIGHT * max(0, profile.in_core_peak_bytes - smallest))
        plan = poochplan.plan(profile, budget_bytes, evaluations=EVALUATIONS)
        promised = plan.prediction
        plans.append(Tried("planner", plan, promised.first_step_peak_bytes, promised.peak_bytes))
        return plans, train(Running(program))


def profile_of(program: Program) -> poochplan.Profile:
    running = Running(program)
    return poochplan.profile(running.step, model=running.model, optimizer=running.optimizer, iterations=1, link=LINK)


def _random(profile: poochplan.Profile, problem: Problem, seed: int, weights: tuple[int, int, int]) -> Tried:
    plan = random_plan(profile, seed, weights)
    schedule, name = schedule_of(plan), "random {}/{}/{}".format(*weights)
    if any(
        decision is Decision.RECOMPUTE and replay is None  # an input of it will be gone: swapped, with a fallback
        for decision, replay in zip(schedule.decisions, problem.replay.replays, strict=True)
    ):
        return Tried(name, plan, None, None)
    foreseen = simulate(problem, schedule)
    return Tried(name, plan, foreseen.first_step_peak_bytes, foreseen.peak_bytes)


def trial_of(program: Program, prepare: Callable[[Program], tuple[Sequence[Run], list[Snapshot]]]) -> Outcome:
    """The runs that ``prepare`` gives, against what the steps give in-core."""
    outcome = Outcome(counts=Counter({"programs": 1}))
    try:
        with quietly():
            runs, reference = prepare(program)
    except Exception as error:
        if is_refused_in_core(program):
            outcome.counts["programs that in-core training refuses"] += 1
        else:
            outcome.problems.append(f"not prepared: {error!r} [{program}]")
        return outcome
    for tried, device in runs:
        found = under(program, tried, reference, device)
        outcome.counts += found.counts if device != FAILING else Counter()
        outcome.problems += [f"{problem} [{program}, {tried.name}, {device}]" for problem in found.problems]
    return outcome


def trial(program: Program, devices: tuple[str, ...] = DEVICES) -> Outcome:
    """Every plan of the program on every device."""

    def prepare(program: Program) -> tuple[list[Run], list[Snapshot]]:
        plans, reference = prepared(program)
        return [*itertools.product(plans, devices), (plans[0], FAILING)], reference

    return trial_of(program, prepare)


def is_refused_in_core(program: Program) -> bool:
    try:
        with quietly():
            train(Running(program))
    except RuntimeError:
        return True
    return False


def under(program: Program, tried: Tried, reference: list[Snapshot], device: str) -> Outcome:
    """All steps of a program under one plan on one device."""
    outcome = Outcome(counts=Counter({"runs": 1}))
    if device == FAILING and {Feature.CHECKPOINT, Feature.REENTRANT} & program.features:
        return Outcome()  # a second backward would run forward once more
    leave_out(live(torch.Tensor))  # of earlier trials, which live as long as the collector lets them
    running = Running(program)
    with quietly(), _session(tried.plan, running, device, outcome) as session:
        try:
            judge = _Judge(outcome, program, session, tried)
            if program.announces:
                running.announce = session.step
            seen = first_step(running) if device == FAILING else train(running, judge)
        except Exception as error:
            _judge_error(outcome, program, error)
            return outcome
    outcome.problems += [
        f"{difference}; steps {program.events}" for difference in differences(reference[: len(seen)], seen)
    ]
    return outcome


class _Judge:
    """Told of each step when it has ended; notes what it counts and what is wrong with it."""

    def __init__(self, outcome: Outcome, program: Program, session: Session, tried: Tried) -> None:
        self._outcome, self._program, self._session, self._tried = outcome, program, session, tried
        self._steps = 0

    def __call__(self, index: int, event: str) -> None:
        counts, report = self._outcome.counts, self._session.report()
        last, new_steps = report.last_step, report.total.steps - self._steps
        self._steps = report.total.steps
        counts["steps"] += 1
        counts["replayed values"] += last.replayed_values
        counts["swapped bytes"] += last.out_bytes
        follows = _follows(self._program, index)
        if follows and new_steps != 1:
            self._outcome.problems.append(f"does not follow: step {index}, {event}, counts as {new_steps}")
        if last.fallbacks:
            counts["steps with fallbacks"] += 1
            if follows and FallbackKind.DIVERGED in last.fallback_kinds:
                self._outcome.problems.append(f"does not follow: step {index}, {event}: {last.fallback_reasons}")
        else:
            counts["steps that followed"] += 1
            self._compare_peak(index, event, last)
        if report.arena is not None:
            counts["steps behind which there is an arena"] += 1
            counts["blocks served"] += report.arena.served
            counts["blocks not served"] += report.arena.unplanned + report.arena.taken

    def _compare_peak(self, index: int, event: str, report: StepReport) -> None:
        """A step that an arena serves has the budget: its arena may be as large as that has room for."""
        peak_bytes, predicted = report.peak_bytes, self._tried.peak_bytes if index else self._tried.first_peak_bytes
        if predicted is not None and report.served_bytes:
            predicted = max(predicted, self._tried.plan.budget_bytes)
        if (
            event not in SAME_STEP
            or peak_bytes is None
            or predicted is None
            or _something_is_left(self._program, index)
        ):
            return
        self._outcome.counts["peaks compared"] += 1
        self._outcome.counts["peaks as predicted"] += peak_bytes == predicted
        if peak_bytes > predicted:
            self._outcome.problems.append(f"peak {peak_bytes} of step {index} is above the predicted {predicted}")


def _something_is_left(program: Program, index: int) -> bool:
    """Whether autograd still holds a part of an abandoned graph, as in-core: until the next backward."""
    earlier = [event for event in program.events[:index] if event not in WITHOUT_BACKWARD]
    return bool(earlier) and earlier[-1] in LEAVES_SOMETHING


def _follows(program: Program, index: int) -> bool:
    """Whether a step is the planned one, for the runtime's clock."""
    event, before = program.events[index], program.events[index - 1] if index else PLAIN
    if program.checkpoints_model and before in ABANDONED:
        return False
    return event in FOLLOWED and not (event == "two backwards" and Feature.SEVERAL_LOSSES in program.features)


def _judge_error(outcome: Outcome, program: Program, error: Exception) -> None:
    may = WRITES in program.events or {Feature.BUFFERS, Feature.DIVERGES} <= program.features
    if may and (LIMIT in str(error) or REPLAYED in str(error)):
        outcome.counts["runs ended by the documented limit"] += 1
    else:
        outcome.problems.append(f"raises {error!r}; steps {program.events}")


@contextlib.contextmanager
def _session(plan: Plan, running: Running, device: str, outcome: Outcome) -> Iterator[Session]:
    """Where peaks are compared with what was predicted, the audit takes nothing beside the steps."""
    with contextlib.ExitStack() as stack:
        if device == UNMETERED:
            yield stack.enter_context(poochplan.apply(plan, running.model, meter="never", arena="off"))
            return
        if device == SERVED:
            yield stack.enter_context(poochplan.apply(plan, running.model, meter="never", arena="on"))
            return
        if device == "cpu":
            yield stack.enter_context(poochplan.apply(plan, running.model, meter="always", on_audit="off"))
            return
        clock = stack.enter_context(OpClock())
        faults = {"failing_reads": 1, "failing_writes": 2} if device == FAILING else {}
        adversary, on_audit = AdversarialDevice(clock, **faults), "warn" if device == FAILING else "off"
        options: Any = {"meter": "always", "on_audit": on_audit}
        yield stack.enter_context(poochplan.apply(plan, running.model, device=lambda: adversary, **options))
        stack.close()
    outcome.problems += adversary.violations


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def warm_up(program: Program) -> None:
    """What a process does once (imports, caches) is done, and left alone by later collections."""
    with quietly():
        train(Running(program))
    gc.collect()
    gc.freeze()
