"""StepTotals: the sums over a session's steps, how many followed their plan, and the complaints if none did."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from poochplan.formats.plan import Instructions, Plan
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.run_report import ArenaReport, MemoryPeaks, Report, SessionStatus, StepReport
from poochplan.torch_private.compiler_internals import compiled_graphs

UNSEEN_STEPS = 3
"""So many steps of optimizers before the first one of a model are told."""
NOTHING_SEEN = (
    "the session sees no step of {}, so nothing is planned: expected a call of the very model that was given, and a "
    "loss.backward() over its own parameters, found neither; torch.func.grad has no such backward, and code that is "
    "compiled around the model hides its calls (compile its blocks instead)"
)


class StepTotals:
    """State: the sum over the steps that have ended, and the last of them; for each model its steps, those that
    followed, those of which no saved tensor reached the session, and its calls on other threads; and how many graphs
    had been compiled before.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self.total = StepReport()
        self._models = models
        self._steps: Counter[str] = Counter()
        self._followed: Counter[str] = Counter()
        self._unseen: Counter[str] = Counter()
        self._elsewhere: Counter[str] = Counter()
        self._updates_before = 0
        """Steps of optimizers before the first one of a model."""
        self._last: Segment | None = None
        self._compiled = compiled_graphs()

    def rested(self, report: StepReport) -> None:
        """Steps have ended in which the session rested. The report has their number and a peak alone."""
        if report.steps:
            self.total.add(report)
            self._steps[next(iter(self._models))] += report.steps

    def called_elsewhere(self, name: str) -> None:
        """A model was called with gradients on a thread that is not the session's."""
        self._elsewhere[name] += 1

    def optimizing(self, segment: Segment) -> str:
        """An optimizer of the models is about to step. Returns a complaint if there is still no step to count."""
        if self._steps or self.is_new(segment):
            return ""
        self._updates_before += 1
        return NOTHING_SEEN.format(self._called) if self._updates_before == UNSEEN_STEPS else ""

    @property
    def _called(self) -> str:
        return " and ".join(type(model).__name__ for model in self._models.values())

    def is_new(self, segment: Segment) -> bool:
        """Whether it is a step that was not counted yet."""
        return bool(segment.number) and not segment.aside and segment is not self._last

    def count(self, segment: Segment, plan: Plan | None) -> None:
        """A new step has ended, which followed the plan or was meant to."""
        self._last = segment
        self.total.add(segment.report)
        name = segment.model if segment.model is not None else next(iter(self._models))
        self._steps[name] += 1
        if plan is None:
            return
        if follows(segment, plan.instructions):
            self._followed[name] += 1
        elif plan.values and segment.calls and not segment.packs and not segment.raised:
            self._unseen[name] += 1

    @property
    def status(self) -> SessionStatus:
        """One word for all steps together."""
        steps, followed = self._steps.total(), self._followed.total()
        if not steps:
            return SessionStatus.NO_STEPS
        if not followed:
            return SessionStatus.NOT_FOLLOWED
        return SessionStatus.FOLLOWED if followed == steps else SessionStatus.PARTLY_FOLLOWED

    def complaints(self, *, are_plans_given: bool) -> Iterator[str]:
        """Lines for the session's end: one for each model whose plan was not followed, without an earlier message. If
        no plans were given, only calls on other threads are a reason.
        """
        if not are_plans_given and not self._steps and not self._elsewhere:
            yield NOTHING_SEEN.format(self._called)
        for name, model in self._models.items():
            called = f"{type(model).__name__}{f' ({name!r})' if name else ''}"
            if self._elsewhere[name]:
                yield (
                    f"{called} was called {self._elsewhere[name]} times on another thread than the session's, where "
                    "no plan is followed; enter the session on the thread that trains"
                )
            elif not are_plans_given:
                continue
            elif not self._steps[name]:
                yield (
                    f"{called} was not called with gradients inside the session, so no step followed its plan; give "
                    "apply() the very model that the loop calls, and enter the session before the loop"
                )
            elif self._unseen[name] and not self._followed[name]:
                yield (
                    f"nothing that {called} saved in {self._unseen[name]} steps reached the session, so none followed "
                    "its plan; other saved-tensors hooks took it (save_on_cpu, a hook of a framework's, checkpointing "
                    "around the whole model): switch them off, or profile the step with them on"
                )

    def report(
        self,
        segment: Segment,
        followed: Plan | None,
        promised: Plan | None,
        memory: MemoryPeaks | None,
        arena: ArenaReport | None,
        expand: bool | None = None,
    ) -> Report:
        """The report, with the open segment as the last step, and the plan that it followed or was meant to.
        ``expand``: whether the allocator's segments do.
        """
        totals = copy.deepcopy(self, {id(self._models): self._models, id(self._last): self._last})
        if self.is_new(segment):
            totals.count(segment, followed)
        return Report(
            last_step=segment.report,
            total=totals.total,
            predicted_peak_bytes=promised.prediction.peak_of_step(arena is not None) if promised is not None else 0,
            predicted_first_step_peak_bytes=promised.prediction.first_step_peak_bytes if promised is not None else 0,
            budget_bytes=promised.budget_bytes if promised is not None else 0,
            predicted_reserved_bytes=promised.prediction.reserved_with(expand) if promised is not None else None,
            steps_followed=totals._followed.total(),
            status=totals.status,
            memory=memory,
            arena=arena,
            compiled_graphs=max(compiled_graphs() - self._compiled, 0),
        )


def follows(segment: Segment, instructions: Instructions) -> bool:
    """Whether the segment has done everything in its plan, up to its backward."""
    if segment.diverged or segment.saves != len(instructions.values):
        return False
    return segment.used or not instructions.uses
