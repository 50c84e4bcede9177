"""PlanBook: the plans that a session's steps may follow, and the profiles that they were made from, by kind of step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.plan_set import PlanSet, Signature
from poochplan.formats.profile import Profile
from poochplan.runtime.step_policies.follow import IndexedPlan

from .active_plan import MOST_PLANS, REMEDY, STILL_GROWS, ActivePlan


class PlanBook:
    """Filled before the first step by :func:`poochplan.apply`, and by a study in :func:`poochplan.auto`.

    State, which outlives a step: the active plans and the known profiles; the open segment's plan, and the last one.
    """

    def __init__(self, profiles: Mapping[str, Profile] | None = None) -> None:
        self.active: dict[Any, ActivePlan] = {}
        self.profiles: dict[Any, Profile] = dict(profiles or {})
        self.had_plan: set[Any] = set()
        """Kinds whose plan was withdrawn."""
        self.times = Counter[Any]()
        """How often a kind was planned again because its steps took more memory."""
        self.followed: dict[Any, ActivePlan] = {}
        """The plan that steps of each kind have followed last."""
        self.following: ActivePlan | None = None
        """The plan that the open segment follows, or has diverged from; None if it follows none."""
        self.last: ActivePlan | None = None
        """The plan that was followed last, or the one in its place."""

    @property
    def latest(self) -> ActivePlan | None:
        """The plan that was followed last, else the first active one; None before there is one."""
        return self.last or next(iter(self.active.values()), None)

    def choose(
        self, kind: Hashable, inputs: Signature, beside: Iterable[ActivePlan]
    ) -> tuple[ActivePlan, IndexedPlan] | None:
        """The plan for exactly that kind, else that of the nearest larger inputs among those ``beside``, as steps of
        these inputs follow it. None without such a plan, and for inputs without shapes.
        """
        found = self.active.get(kind)
        if found is not None:
            return found, found.exact
        others = list(beside)
        try:
            plan = PlanSet([one.plan for one in others]).choose(inputs) if others else None
        except UsageError:
            return None
        found = next((one for one in others if one.plan is plan), None)
        if found is None:
            return None
        return found, found.exact if sorted(found.plan.inputs) == sorted(inputs) else found.smaller

    def put(self, kind: Hashable, plan: Plan) -> ActivePlan:
        """Steps of that kind follow the plan from the next segment on."""
        self.active[kind] = ActivePlan(kind, plan)
        return self.active[kind]

    def withdraw(self, kind: Hashable) -> None:
        if self.active.pop(kind, None) is not None:
            self.had_plan.add(kind)

    def follow(self, plan: ActivePlan) -> None:
        """The segment that begins follows it."""
        self.following = self.last = plan

    def leave(self, plan: ActivePlan) -> None:
        """Steps differ from the plan for good."""
        self.withdraw(plan.kind)
        self.last = None if self.last is plan else self.last

    def why_not_again(self, kind: Hashable) -> str:
        """Why no other plan is made although steps of that kind take more memory; empty if one may be."""
        if kind not in self.profiles:
            return REMEDY
        return STILL_GROWS if self.times[kind] == MOST_PLANS else ""
