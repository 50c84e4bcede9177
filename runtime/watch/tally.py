"""Tally: how many steps followed their plan, and what a session has to say at its end where they did not."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from poochplan.formats.plan import Instructions, Plan
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.run_report import ArenaReport, MemoryPeaks, Report, SessionStatus, StepReport
from poochplan.torch_private.compiler_internals import compiled_graphs


class Tally:
    """State: by name of the model, its steps, those that followed, those that nothing was seen of, and calls elsewhere.

    Parameters
    ----------
    models: those that there are plans for.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self._models = models
        self._steps: Counter[str] = Counter()
        self._followed: Counter[str] = Counter()
        self._unseen: Counter[str] = Counter()
        self._elsewhere: Counter[str] = Counter()

    def copy(self) -> Tally:
        """The same figures so far, to go on with apart."""
        return copy.deepcopy(self, {id(self._models): self._models})

    def called_elsewhere(self, name: str) -> None:
        """A model was called with gradients on a thread that is not the session's."""
        self._elsewhere[name] += 1

    def ended(self, segment: Segment, name: str, instructions: Instructions) -> None:
        """A step of that model has ended, which was to follow these."""
        self._steps[name] += 1
        if follows(segment, instructions):
            self._followed[name] += 1
        elif instructions.values and segment.calls and not segment.packs and not segment.raised:
            self._unseen[name] += 1

    def steps_of(self, name: str) -> int:
        """How many of that model have ended."""
        return self._steps[name]

    @property
    def steps_followed(self) -> int:
        """How many steps did what their plan says, from the first save to backward."""
        return self._followed.total()

    @property
    def status(self) -> SessionStatus:
        """All steps together, in a word."""
        steps, followed = self._steps.total(), self.steps_followed
        if not steps:
            return SessionStatus.NO_STEPS
        if not followed:
            return SessionStatus.NOT_FOLLOWED
        return SessionStatus.FOLLOWED if followed == steps else SessionStatus.PARTLY_FOLLOWED

    def complaints(self) -> Iterator[str]:
        """What is to be said at the end: a line for each model whose plan was not followed in silence."""
        for name, model in self._models.items():
            called = f"{type(model).__name__}{f' ({name!r})' if name else ''}"
            if self._elsewhere[name]:
                yield (
                    f"{called} was called {self._elsewhere[name]} times on another thread than the session's, where "
                    "no plan is followed; enter the session on the thread that trains"
                )
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


class Accounts:
    """What the steps of a session did, in all. State: the sum, the tally, and the segment that was counted last; how
    many graphs had been compiled before.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self.tally = Tally(models)
        self._total = StepReport()
        self._last: Segment | None = None
        self._compiled = compiled_graphs()

    def is_new(self, segment: Segment) -> bool:
        """Whether it is a step, and not counted yet."""
        return bool(segment.number) and not segment.aside and segment is not self._last

    def count(self, segment: Segment, name: str, instructions: Instructions) -> None:
        """A new step has ended."""
        self._last = segment
        self._total.add(segment.report)
        self.tally.ended(segment, name, instructions)

    def report(
        self, segment: Segment, name: str, plan: Plan, memory: MemoryPeaks | None, arena: ArenaReport | None
    ) -> Report:
        """With the open segment as the last step, which followed ``plan`` or was to."""
        tally, total = self.tally, StepReport()
        total.add(self._total)
        if self.is_new(segment):
            total.add(segment.report)
            tally = tally.copy()
            tally.ended(segment, name, plan.instructions)
        return Report(
            last_step=segment.report,
            total=total,
            predicted_peak_bytes=plan.prediction.peak_bytes,
            predicted_first_step_peak_bytes=plan.prediction.first_step_peak_bytes,
            budget_bytes=plan.budget_bytes,
            steps_followed=tally.steps_followed,
            status=tally.status,
            memory=memory,
            arena=arena,
            compiled_graphs=max(compiled_graphs() - self._compiled, 0),
        )


def follows(segment: Segment, instructions: Instructions) -> bool:
    """Whether the segment has done all that is planned up to its backward."""
    if segment.diverged or segment.saves != len(instructions.values):
        return False
    return segment.used or not instructions.uses
