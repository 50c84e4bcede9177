"""Choosers: the plan, or that one of a set which is for the step's inputs; and one driver for every segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from poochplan.formats.plan import Instructions
from poochplan.formats.plan_set import PlanSet, Signature, describe
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.run_report import FallbackKind

from .course import Course
from .diagnosis import UNKNOWN, Expected
from .driver import Actions, Diverged, Driver
from .follow import DivergencePolicy, Follow
from .keep_all import KeepAll
from .swap_each import SwapEach


class Planned:
    """Follows lone instructions exactly, whatever the inputs are; of a set, those for the inputs or larger ones.

    State: the ``instructions`` that were followed last.

    Parameters
    ----------
    given: the lone instructions, or the set.
    policy: what a step does that is not the planned one.
    expected: what else is known of the step. Where it calls its model, what is saved without that, and the plan has the
        model's layers save, is none of its steps: it is kept, as if there were no session.
    """

    def __init__(
        self,
        given: Instructions | PlanSet,
        policy: DivergencePolicy = DivergencePolicy.WARN,
        *,
        expected: Expected = UNKNOWN,
    ) -> None:
        self._policy = policy
        self._expected = expected
        self.follow(given)

    def follow(self, given: Instructions | PlanSet) -> None:
        """From the next segment on these."""
        self._set = given if isinstance(given, PlanSet) else None
        self.alternatives: Sequence[Instructions] = (
            tuple(plan.instructions for plan in given.plans) if isinstance(given, PlanSet) else (given,)
        )
        self._courses = {
            (id(one), exact): Course.of(one, exact=exact) for one in self.alternatives for exact in (True, False)
        }
        self.instructions = self.alternatives[0]

    def choose(self, segment: Segment) -> Driver | None:
        if self._expected.inputs and segment.model is None and not segment.announced:
            if not segment.saves_next:
                return None  # a call of the model, or a save, tells
            if all(one.values and one.values[0].layer for one in self.alternatives):
                segment.aside = True
                return KeepAll()
        if self._set is None:
            return self._following(exact=True)
        if segment.inputs is None:
            return WithoutPlan(_TOO_EARLY, self._policy) if segment.saves_next else None
        plan = self._set.choose(segment.inputs)
        if plan is None:
            return WithoutPlan(self._why_none(segment.inputs), self._policy)
        self.instructions = plan.instructions
        return self._following(exact=sorted(plan.inputs) == sorted(segment.inputs))

    def _following(self, *, exact: bool) -> Follow:
        course = self._courses[id(self.instructions), exact]
        expected = self._expected if self._set is None else self._expected._replace(inputs=())  # may be larger ones
        return Follow(course, SwapEach(), self._policy, expected=expected)

    def _why_none(self, signature: Signature) -> str:
        assert self._set is not None, "lone instructions are for any inputs"
        return (
            f"its inputs: expected at most {describe(self._set.largest.inputs)} "
            f"(the largest plan of {len(self._set.plans)}), "
            f"found {describe(signature)}; give one of these shapes to poochplan.plan_set"
        )


_TOO_EARLY = "something saved before its model is called: a set picks the plan by the model's inputs"


class WithoutPlan(SwapEach):
    """The safe policy for a segment that no plan is for: as if it diverged where it began."""

    def __init__(self, why: str, policy: DivergencePolicy) -> None:
        super().__init__()
        self._why = why
        self._policy = policy

    def begin(self, segment: Segment) -> Actions:
        raise Diverged(self._why, FallbackKind.NO_PLAN)

    def diverged(self, reason: Diverged) -> tuple[Driver, Actions]:
        self._policy.judge(reason)
        return super().diverged(reason)


class ByModel:
    """Several models, each with a chooser of its own: the model that a segment is of decides.

    A segment that begins with a save is none of theirs until it is announced or one of them is called.
    """

    def __init__(self, choosers: Mapping[str, Planned]) -> None:
        self._choosers = choosers

    @property
    def alternatives(self) -> Sequence[Instructions]:
        return [one for chooser in self._choosers.values() for one in chooser.alternatives]

    def choose(self, segment: Segment) -> Driver | None:
        if segment.model is not None:
            return self._choosers[segment.model].choose(segment)
        if not segment.saves_next:
            return None
        segment.aside = True
        return KeepAll()


class Always:
    """Gives every segment a driver of one make."""

    def __init__(self, make: Callable[[], Driver]) -> None:
        self._make = make
        self.alternatives: Sequence[Instructions] = ()

    def choose(self, segment: Segment) -> Driver:
        return self._make()
