"""BudgetKeeper: what a session does about steps that take more than their budgets: says so, raises, or plans anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Protocol

from poochplan.errors import InfeasibleError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.formats.profile_parts import rounded_up
from poochplan.runtime.budget_watch import BudgetWatch, OverBudget, over_budget_text
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.units import format_bytes

from .holders import Holder, Own, holders
from .step_meter import Moment, StepMeter

MOST_PLANS = 4
"""So many times a model's step is planned anew; what grows further is told instead."""


class Replan(Protocol):
    """Plans; the runtime does not know how."""

    def __call__(self, profile: Profile, plan: Plan, beside_bytes: int) -> Plan:
        """A plan for the same budget, with so many bytes more that live all step long than ``profile`` has.

        Raises ``InfeasibleError`` where there is none.
        """


class BudgetKeeper:
    """State: for each model its watch, and what was found to live beside its step.

    Parameters
    ----------
    policy: what is done.
    replan, profiles: for the policy that plans anew; the profiles by the names of the models.
    """

    def __init__(
        self, policy: OverBudget, replan: Replan | None = None, profiles: Mapping[str, Profile] | None = None
    ) -> None:
        self._policy = policy
        self._replan = replan
        self._profiles = profiles or {}
        self._watches: defaultdict[str, BudgetWatch] = defaultdict(lambda: BudgetWatch(policy))
        self._beside_bytes: dict[str, int] = defaultdict(int)
        self._plans: dict[str, int] = defaultdict(int)

    def is_over(self, peak_bytes: int, plan: Plan, name: str = "") -> bool:
        """Whether something is to be done or said about a step of that model that took so much; once it was said, no
        more.
        """
        return self._watches[name].is_over(peak_bytes, plan)

    def look(self, segment: Segment, moment: Moment | None, engine: Engine, name: str, plan: Plan) -> Plan | None:
        """A step of that model followed ``plan`` to its end: the plan for those to come, where it is another.

        Raises ``BudgetExceededError`` if that is the policy.
        """
        watch, peak_bytes = self._watches[name], segment.report.peak_bytes
        if peak_bytes is None or not watch.is_over(peak_bytes, plan):
            return None

        def held() -> list[Holder]:
            return held_beside(engine, segment, plan)

        where = described(moment, plan)
        if self._policy is not OverBudget.REPLAN or self._replan is None:
            watch.look(peak_bytes, plan, where, held)
            return None
        text = over_budget_text(peak_bytes, plan, where, held())
        if self._plans[name] == MOST_PLANS:
            watch.tell(f"{text}; it has been planned anew {MOST_PLANS} times, and grows on: let go of what is kept")
            return None
        promised_bytes = plan.prediction.peak_bytes
        if segment.report.served_bytes and plan.prediction.arena_peak_bytes is not None:
            promised_bytes = max(promised_bytes, plan.prediction.arena_peak_bytes)
        beside_bytes = self._beside_bytes[name] + rounded_up(max(1, peak_bytes - promised_bytes))
        try:
            changed = self._replan(self._profiles[name], plan, beside_bytes)
        except InfeasibleError as error:
            watch.tell(f"{text}; with {format_bytes(beside_bytes)} more beside the step {error}")
            return None
        self._beside_bytes[name] = beside_bytes
        self._plans[name] += 1
        watch.tell(
            f"{text}; from the next step on a plan is followed that knows of {format_bytes(beside_bytes)} more "
            f"(predicted: {changed.prediction.overhead:.1%} slower than in-core)"
        )
        watch.starts_anew()
        return changed

    def is_settled(self, steps: int, peak_bytes: int, plan: Plan, name: str = "", *, kind: Hashable = None) -> bool:
        """Whether the steps of that model are alike by now; see :meth:`BudgetWatch.is_settled`."""
        return self._watches[name].is_settled(steps, peak_bytes, plan, kind=kind)


class MeteredSteps:
    """A session's steps as they are metered, and what is done about their peaks. State: of which models they are alike
    by now.
    """

    def __init__(self, meter: StepMeter, keeper: BudgetKeeper, names: Iterable[str]) -> None:
        self._meter, self._keeper = meter, keeper
        self._is_settled = dict.fromkeys(names, False)

    def take_peak(self, segment: Segment) -> None:
        """Its report has what was metered of it so far."""
        peak_bytes = self._meter.peak_bytes
        if peak_bytes is not None:
            segment.report.peak_bytes = peak_bytes

    def look(self, segment: Segment, engine: Engine, name: str, plan: Plan, *, is_last: bool) -> Plan | None:
        """A step that followed its plan may have taken more than its budget; of others it has been told why. The plan
        for those to come, where it is another. ``is_last``: no other step is to be metered to be certain.
        """
        peak_bytes = segment.report.peak_bytes
        if not segment.number or peak_bytes is None or segment.report.fallbacks:
            return None
        if not self._keeper.is_over(peak_bytes, plan, name):
            return None
        if not self._meter.is_certain and not is_last:
            self._meter.check_next()
            return None
        return self._keeper.look(segment, self._meter.moment, engine, name, plan)

    def settle(self, segment: Segment, steps: int, name: str, plan: Plan) -> None:
        """A step of that model has ended, the ``steps``-th: steps may be alike by now."""
        peak_bytes, has_gradients = self._meter.blocks_peak_bytes, bool(segment.gradient_bytes)
        if peak_bytes is not None:  # of one that was not metered nothing is known
            self._is_settled[name] = self._keeper.is_settled(steps, peak_bytes, plan, name, kind=has_gradients)
            self._meter.settled(all(self._is_settled.values()))


def held_beside(engine: Engine, segment: Segment, plan: Plan) -> list[Holder]:
    """Who holds more on the engine's device than the plan of that segment knows of."""
    inputs = [(reference(), size_bytes) for reference, size_bytes in segment.given]
    own = Own(engine.model_of(segment), engine.left_over_storages(), segment.left_over_bytes, inputs, plan.static_bytes)
    return holders(engine.device.kind, own)


def described(moment: Moment | None, plan: Plan) -> str:
    """The moment in words; empty where it is not known."""
    if moment is None:
        return ""
    layer = moment.layer(plan.instructions)
    return f"{moment.part}{f' of {layer}' if layer else ''}"
