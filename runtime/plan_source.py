"""PlanSource: what a session's steps do, and which plan they follow. GivenPlans: the source with the user's plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from poochplan.errors import DivergenceError, InfeasibleError
from poochplan.formats.plan import Decision, Instructions, Plan
from poochplan.formats.plan_set import PlanSet, describe, plans_of
from poochplan.formats.profile import Profile
from poochplan.formats.queries import with_kept
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.mechanism import Mechanism, rebuild_together
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.messages import warn
from poochplan.runtime.metering.watch import MostBytes
from poochplan.runtime.step_policies.follow import DivergencePolicy, Follow
from poochplan.runtime.step_policies.step_policy import Actions, Diverged, KeepAll, StepPolicy, SwapEach
from poochplan.torch_private.hooks import Hooks
from poochplan.units import format_bytes

from .active_plan import MOST_PLANS, REMEDY, STILL_GROWS, ActivePlan
from .run_report import FallbackKind, Fallbacks

KEPT_FROM_NOW_ON = "from now on such values are kept, and steps may exceed the budget"
KEPT_BY_PLAN = "from now on such values are kept, and another plan is made that does so"


class Attached(Protocol):
    """What a source may ask of its :class:`~.attachment.Attachment`."""

    engine: Engine
    models: Mapping[str, torch.nn.Module]

    @property
    def is_open(self) -> bool: ...

    @property
    def is_resting(self) -> bool: ...

    def memory_is_short(self) -> None: ...

    def take_hooks_off(self) -> None: ...

    def ends_here(self) -> bool: ...

    def wakes_next(self) -> None: ...


class PlanSource:
    """Base class, in which no step follows a plan. A session asks it for the step policy of each step (it is the
    engine's :class:`~.step_policies.step_policy.Chooser`), and reports to it how each step ended.
    """

    is_given = False
    """Whether the user gave the plans. Then the session complains about steps that follow none."""
    gives_up = False
    """Whether values leave the device from the first step on."""
    alternatives: Sequence[Instructions] = ()
    latest: ActivePlan | None = None
    """The plan that was followed last, else the first active one; None before there is one."""

    @property
    def limit_bytes(self) -> int:
        """What the open segment, which follows no plan, is to take at most; 0 if that does not matter."""
        return 0

    @property
    def limits_reserved(self) -> bool:
        """Whether that limit is one of what the allocator takes from a GPU."""
        return False

    @property
    def plans(self) -> Mapping[Hashable, ActivePlan]:
        """The active plans, by kind of step."""
        return {}

    @property
    def profiles(self) -> Mapping[Any, Profile]:
        """The known profiles of the steps, by the same kinds."""
        return {}

    def attached(self, attachment: Attached) -> Hooks:
        """The session begins. Returns the hooks that autograd calls: the engine's own, or some that call these."""
        return attachment.engine.pack, attachment.engine.unpack

    def rebuild(self, value: SavedValue, mechanism: Mechanism) -> None:
        """Brings back a value that waits for its replay."""
        rebuild_together(value, mechanism)

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return call

    def choose(self, segment: Segment) -> StepPolicy | None:
        """See :class:`~.step_policies.step_policy.Chooser`."""
        return KeepAll()

    def following(self, segment: Segment) -> ActivePlan | None:
        """The plan that the segment follows, or has diverged from; the segment has its step policy."""
        return None

    def begins(self, segment: Segment) -> None:
        """A segment that has its step policy is about to begin. No log of another step continues into it."""

    def optimizing(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the models is about to step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the models has stepped."""

    def ended(self, segment: Segment) -> None:
        """A segment is over, and all its facts are known."""

    def rests(self) -> MostBytes | None:
        """Called between two segments. None if steps to come have use for the session; else what steps may take before
        they are observed again.
        """
        return None

    def wakes(self, peak_bytes: int) -> str:
        """Steps are observed again, because one took so many bytes. Returns a sentence that says so, or nothing."""
        return ""

    def plan_again(self, plan: ActivePlan, more_bytes: int) -> str:
        """Asks for another plan: steps take ``more_bytes`` more than predicted. Returns a sentence on what follows."""
        return ""

    def keep(self, plan: ActivePlan, names: Iterable[str]) -> str:
        """Asks for another plan: these values of the plan are to be kept. Returns a sentence on what follows."""
        return KEPT_FROM_NOW_ON

    def lacks_arena(self, plan: ActivePlan, more_bytes: int) -> None:
        """Steps of the plan use no arena, because it would need ``more_bytes`` more than the budget leaves."""

    def wait(self, timeout_s: float | None) -> bool:
        """Waits, between two steps, until no plan is being made. Returns whether each known kind of step has one."""
        return True

    def stands_aside(self) -> None:
        """The session stands aside: nothing observes the open segment any more."""

    def close(self) -> None:
        """The session has ended."""


Replan = Callable[[Profile, Plan, int], Plan]
"""Makes a plan for the same budget in which so many bytes live beside the step, or raises ``InfeasibleError``: the
runtime itself cannot plan.
"""


class Peers(Protocol):
    """The processes that train the models together. Each calls these at the same place."""

    def check_same(self, content: bytes, /) -> None:
        """Raises ``UsageError`` on all of them if they do not all give the same."""

    def gathered(self, what: str, /) -> list[str]:
        """What each of them gives."""

    def are_uneven(self) -> bool:
        """Whether they may take different numbers of steps, so that one that waits for the others may wait for ever."""

    def close(self) -> None:
        """Ends what connects this process with the others."""


RanksOf = Callable[[Iterable[torch.nn.Module]], Peers | None]
"""The ranks of models; None if this process trains them alone."""


class GivenPlans(PlanSource):
    """State: the plan that each model's steps follow, the bytes found outside the plan, and the last step's model; and
    the ranks, until the first step is over. They tell each other whether it has diverged, so that all say the same.

    With several models, a segment that begins with a save belongs to none until it is announced or one is called.

    Parameters
    ----------
    plans, models: by the names of the models; a single one has the name "".
    policy: what a step does that diverges from its plan.
    profiles: of the plans, if they are known.
    replan: makes new plans from the profiles; None if there are to be no new plans.
    ranks_of: finds the ranks.
    """

    is_given = True

    def __init__(
        self,
        plans: Mapping[str, Plan | PlanSet],
        models: Mapping[str, torch.nn.Module],
        policy: DivergencePolicy,
        profiles: Mapping[str, Profile],
        replan: Replan | None,
        ranks_of: RanksOf,
    ) -> None:
        self._of = {name: PlansOfModel(name, plan, models[name], policy) for name, plan in plans.items()}
        self._profiles, self._replan, self._policy = profiles, replan, policy
        self._ranks_of = ranks_of
        self._ranks: Peers | None = None
        self._fallbacks = Fallbacks()
        """The engine's, once the session has begun."""
        self._name = next(iter(plans))
        self._beside_bytes, self._times = Counter[str](), Counter[str]()
        values = (value for one in self._of.values() for plan in one.every for value in plan.plan.values)
        self.gives_up = any(value.decision is not Decision.KEEP for value in values)

    @property
    def alternatives(self) -> Sequence[Instructions]:  # type: ignore[override]
        return [plan.plan.instructions for one in self._of.values() for plan in one.every]

    @property
    def plans(self) -> Mapping[Hashable, ActivePlan]:
        return {plan.kind: plan for one in self._of.values() for plan in one.every}

    @property
    def profiles(self) -> Mapping[str, Profile]:
        return self._profiles

    @property
    def latest(self) -> ActivePlan:  # type: ignore[override]
        return self._of[self._name].latest

    def attached(self, attachment: Attached) -> Hooks:
        self._fallbacks = attachment.engine.fallbacks
        self._ranks = self._ranks_of(attachment.models.values())
        if self._ranks is not None:
            every = [plan.plan.fingerprint for one in self._of.values() for plan in one.every]
            self._ranks.check_same(" ".join(every).encode())
            self._awaits_ranks(is_waiting=True)
        return super().attached(attachment)

    def _awaits_ranks(self, *, is_waiting: bool) -> None:
        """While it does, a step that diverges is no error, and not told."""
        self._fallbacks.silent = is_waiting
        for one in self._of.values():
            one.policy = DivergencePolicy.WARN if is_waiting else self._policy

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """All ranks come here. If one diverged and that is the policy, ``DivergenceError`` is raised on all."""
        if self._ranks is None:
            return
        ranks, self._ranks = self._ranks, None
        self._awaits_ranks(is_waiting=False)
        unsaid = self._fallbacks.unsaid
        mine = next((kind for kind in (FallbackKind.DIVERGED, FallbackKind.NO_PLAN) if kind in unsaid), None)
        own = unsaid.pop(mine) if mine is not None else ""
        every = [own] if ranks.are_uneven() else ranks.gathered(own)
        ranks.close()
        line = next((f"rank {rank}: {why}" if len(every) > 1 else why for rank, why in enumerate(every) if why), "")
        if line and self._policy is DivergencePolicy.ERROR:
            raise DivergenceError(f"{line}; give all ranks the step that was profiled, or profile it anew")
        if line and mine is None:
            warn(line)
        elif mine is not None:
            unsaid[mine] = line
        self._fallbacks.say()

    def close(self) -> None:
        if self._ranks is not None:  # without a step of an optimizer
            self._fallbacks.say()
            self._ranks.close()

    def choose(self, segment: Segment) -> StepPolicy | None:
        if "" in self._of:
            return self._of[""].choose(segment)
        if segment.model is not None:
            self._name = segment.model
            return self._of[segment.model].choose(segment)
        if not segment.saves_next:
            return None
        segment.aside = True
        return KeepAll()

    def following(self, segment: Segment) -> ActivePlan:
        return self._of[segment.model].latest if segment.model in self._of else self.latest

    def keep(self, plan: ActivePlan, names: Iterable[str]) -> str:
        """Makes the new plan while the training waits, if the profile is known."""
        name, beside_bytes = str(plan.kind), self._beside_bytes[str(plan.kind)]
        if self._replan is None or name not in self._profiles:
            return KEPT_FROM_NOW_ON
        profile = with_kept(self._profiles[name], names)
        try:
            changed = self._replan(profile, plan.plan, beside_bytes)
        except InfeasibleError as error:
            return f"{KEPT_FROM_NOW_ON}: if they are kept, {error}"
        self._profiles = {**self._profiles, name: profile}
        self._of[name].follow(changed)
        return KEPT_BY_PLAN

    def plan_again(self, plan: ActivePlan, more_bytes: int) -> str:
        """Makes the new plan while the training waits. The next steps follow it."""
        name = str(plan.kind)
        if self._replan is None:
            return REMEDY
        if self._times[name] == MOST_PLANS:
            return STILL_GROWS
        beside_bytes = self._beside_bytes[name] + more_bytes
        try:
            changed = self._replan(self._profiles[name], plan.plan, beside_bytes)
        except InfeasibleError as error:
            return f"with {format_bytes(beside_bytes)} more outside the step {error}"
        self._beside_bytes[name] = beside_bytes
        self._times[name] += 1
        self._of[name].follow(changed)
        return (
            f"from the next step on, steps follow a plan that has room for {format_bytes(beside_bytes)} more "
            f"(predicted: {changed.prediction.overhead:.1%} slower than in-core)"
        )


class PlansOfModel:
    """The plans of one model. A single plan is followed exactly, whatever the inputs are. In a set, the plan for the
    step's inputs is followed, or the nearest larger one.

    State: ``latest``, the plan that was followed last. If the plans expect the model's layers to save first, tensors
    that are saved before the model is called belong to no step. They are kept, as without a session.
    """

    def __init__(self, name: str, given: Plan | PlanSet, model: torch.nn.Module, policy: DivergencePolicy) -> None:
        self._name, self.policy = name, policy
        self._set = given if isinstance(given, PlanSet) else None
        plans = plans_of(given)
        self._inputs, self._model = plans[0].inputs, model
        self.every = [ActivePlan(name if self._set is None else (name, *plan.inputs), plan) for plan in plans]
        self.latest = self.every[0]

    def follow(self, plan: Plan) -> None:
        """Replaces the single plan from the next segment on."""
        self.latest = ActivePlan(self._name, plan)
        self.every = [self.latest]

    def choose(self, segment: Segment) -> StepPolicy | None:
        if self._inputs and segment.model is None and not segment.announced:
            if not segment.saves_next:
                return None  # a call of the model, or a save, decides
            if all(one.plan.saved and one.plan.saved[0].layer for one in self.every):
                segment.aside = True
                return KeepAll()
        if self._set is None:
            tensors = self.latest.plan.model.tensors
            return Follow(
                self.latest.exact, SwapEach(), self.policy, inputs=self._inputs, model=self._model, tensors=tensors
            )
        if segment.inputs is None:
            return WithoutPlan(_TOO_EARLY, self.policy) if segment.saves_next else None
        plan = self._set.choose(segment.inputs)
        if plan is None:
            largest = f"{describe(self._set.largest.inputs)} (the largest plan of {len(self._set.plans)})"
            found = f"found {describe(segment.inputs)}; give one of these shapes to poochplan.plan_set"
            return WithoutPlan(f"its inputs: expected at most {largest}, {found}", self.policy)
        self.latest = next(one for one in self.every if one.plan is plan)
        is_exact = sorted(plan.inputs) == sorted(segment.inputs)
        indexed = self.latest.exact if is_exact else self.latest.smaller
        return Follow(indexed, SwapEach(), self.policy, model=self._model, tensors=plan.model.tensors)


_TOO_EARLY = "something saved before its model is called: a set picks the plan by the model's inputs"


class WithoutPlan(SwapEach):
    """The safe policy for a segment without a plan: it acts as if the segment diverged at its beginning."""

    def __init__(self, why: str, policy: DivergencePolicy) -> None:
        super().__init__()
        self._why = why
        self._policy = policy

    def begin(self, segment: Segment) -> Actions:
        raise Diverged(self._why, FallbackKind.NO_PLAN)

    def diverged(self, reason: Diverged) -> tuple[StepPolicy, Actions]:
        self._policy.judge(reason)
        return super().diverged(reason)
