"""Ways: the plans in force, by kind of segment, and the one that a segment follows."""

from __future__ import annotations

from typing import NamedTuple

from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet
from poochplan.profiler.live.lines import Key
from poochplan.runtime.drivers.course import Course


class Way(NamedTuple):
    """A plan in force; ``course`` for segments such as the planned one, ``smaller`` for those of smaller inputs."""

    key: Key
    plan: Plan
    course: Course
    smaller: Course

    @classmethod
    def of(cls, key: Key, plan: Plan) -> Way:
        return cls(key, plan, Course.of(plan.instructions), Course.of(plan.instructions, exact=False))


class Ways(dict[Key, Way]):
    """By the kind that each was made for."""

    def choose(self, key: Key) -> tuple[Way, Course] | None:
        """The plan for just that kind; else that of the nearest larger inputs at the same place."""
        exact = self.get(key)
        if exact is not None:
            return exact, exact.course
        others = [way for way in self.values() if way.key._replace(inputs=key.inputs) == key and way.plan.inputs]
        if not others:
            return None
        try:
            plan = PlanSet([way.plan for way in others]).choose(key.inputs)
        except UsageError:  # inputs that no shape tells
            return None
        return next(((way, way.smaller) for way in others if way.plan is plan), None)
