"""PlanSource: the plans that a session's steps follow. GivenPlans: the user's. StepObserver: what looks at steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from poochplan.errors import DivergenceError, InfeasibleError
from poochplan.formats.plan import Decision, Instructions, Plan
from poochplan.formats.plan_set import PlanSet, Signature, describe, plans_of
from poochplan.formats.profile import Profile
from poochplan.formats.queries import with_kept
from poochplan.runtime.arena.recorded_layout import PackBlocks
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.messages import warn
from poochplan.runtime.metering.watch import MostBytes
from poochplan.runtime.step_policies.follow import DivergencePolicy, Follow, IndexedPlan
from poochplan.runtime.step_policies.step_policy import Actions, Diverged, KeepAll, StepPolicy, SwapEach
from poochplan.torch_private.hooks import Hooks
from poochplan.units import format_bytes

from .active_plan import REMEDY, ActivePlan
from .plan_book import PlanBook
from .run_report import FallbackKind, Fallbacks

KEPT_FROM_NOW_ON = "from now on such values are kept, and steps may exceed the budget"
KEPT_BY_PLAN = "from now on such values are kept, and another plan is made that does so"


class Attached(Protocol):
    """What sources and observers may ask of their :class:`~.attachment.Attachment`."""

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
    """Base class, in which no step follows a plan. A session asks it which plan each step follows, if any, and reports
    to it how each step ended. ``book`` has the plans.
    """

    is_given = False
    """Whether the user gave the plans. Then the session complains about steps that follow none."""
    gives_up = False
    """Whether values leave the device from the first step on."""
    limit_bytes = 0
    """What the open segment, which follows no plan, is to take at most; 0 if that does not matter."""
    limits_reserved = False
    """Whether that limit is one of what the allocator takes from a GPU."""

    def __init__(self) -> None:
        self.book = PlanBook()

    def attached(self, attachment: Attached) -> None:
        """The session begins."""

    def choose(self, segment: Segment) -> StepPolicy | None:
        """See :class:`~.step_policies.step_policy.Chooser`."""
        return KeepAll()

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

    def close(self) -> None:
        """The session has ended."""


class StepObserver:
    """Base class, which observes nothing. It sees each segment before its source of plans does (it is the engine's
    :class:`~.step_policies.step_policy.Chooser`), and all that the segment does.
    """

    alternatives: Sequence[Instructions] = ()

    def __init__(self, source: PlanSource) -> None:
        self._source = source
        self.alternatives = [one.plan.instructions for one in source.book.active.values()]

    def attached(self, attachment: Attached) -> Hooks:
        """The session begins. Returns the hooks that autograd calls: the engine's own, or some that call these."""
        return attachment.engine.pack, attachment.engine.unpack

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return call

    def choose(self, segment: Segment) -> StepPolicy | None:
        """See :class:`~.step_policies.step_policy.Chooser`."""
        return self._source.choose(segment)

    def begins(self, segment: Segment) -> None:
        """A segment that has its step policy is about to begin. No log of another step continues into it."""

    def optimizing(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the models is about to step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the models has stepped."""

    def ended(self, segment: Segment) -> None:
        """A segment is over, and all its facts are known."""

    def stands_aside(self) -> None:
        """The session stands aside: nothing observes the open segment any more."""

    def close(self) -> None:
        """The session has ended."""


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


class Planner(NamedTuple):
    """The planner's functions for a session: the runtime does not know the planner."""

    replan: Callable[[Profile, Plan, int], Plan]
    """Makes a plan for the same budget in which so many bytes live beside the step, or raises ``InfeasibleError``."""
    pack: PackBlocks
    """Makes a layout for the blocks of a step."""
    explain: Callable[[Profile, Plan | None, int | None], str]
    """Describes where a step takes most memory, and its holders."""
    ranks_of: Callable[[Iterable[torch.nn.Module]], Peers | None]
    """The ranks of models; None if this process trains them alone."""


class GivenPlans(PlanSource):
    """The user's plans, by model. A single plan is followed exactly, whatever the inputs are. In a set, the plan for
    the step's inputs is followed, or the nearest larger one.

    State: the last step's model, the bytes found outside the plans, and the ranks, until the first step is over. They
    tell each other whether it has diverged, so that all say the same.

    With several models, a segment that begins with a save belongs to none until it is announced or one is called. If
    the plans expect the model's layers to save first, tensors that are saved before the model is called belong to no
    step. They are kept, as without a session.

    Parameters
    ----------
    plans, models: by the names of the models; a single one has the name "".
    policy: what a step does that diverges from its plan.
    profiles: of the plans, if they are known.
    planner: makes new plans from the profiles, and finds the ranks; without one there are neither.
    """

    is_given = True

    def __init__(
        self,
        plans: Mapping[str, Plan | PlanSet],
        models: Mapping[str, torch.nn.Module],
        policy: DivergencePolicy,
        profiles: Mapping[str, Profile],
        planner: Planner | None,
    ) -> None:
        self.book = PlanBook(profiles)
        self._sets = {name: one for name, one in plans.items() if isinstance(one, PlanSet)}
        self._of = {name: [self._put(name, plan) for plan in plans_of(one)] for name, one in plans.items()}
        self._models, self._planner = models, planner
        self._policy = self._policy_now = policy
        self._ranks: Peers | None = None
        self._fallbacks = Fallbacks()
        """The engine's, once the session has begun."""
        self._name = next(iter(plans))
        self._latest = {name: one for name, (one, *_) in self._of.items()}
        values = (value for one in self.book.active.values() for value in one.plan.values)
        self.gives_up = any(value.decision is not Decision.KEEP for value in values)
        self._beside_bytes = Counter[str]()

    def _put(self, name: str, plan: Plan) -> ActivePlan:
        return self.book.put((name, *plan.inputs) if name in self._sets else name, plan)

    def attached(self, attachment: Attached) -> None:
        self._fallbacks = attachment.engine.fallbacks
        self._ranks = self._planner.ranks_of(attachment.models.values()) if self._planner is not None else None
        if self._ranks is not None:
            every = [one.plan.fingerprint for one in self.book.active.values()]
            self._ranks.check_same(" ".join(every).encode())
            self._awaits_ranks(is_waiting=True)

    def _awaits_ranks(self, *, is_waiting: bool) -> None:
        """While it does, a step that diverges is no error, and not told."""
        self._fallbacks.silent = is_waiting
        self._policy_now = DivergencePolicy.WARN if is_waiting else self._policy

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

    # -- plans for segments -----------------------------------------------------------------------------------

    def choose(self, segment: Segment) -> StepPolicy | None:
        is_alone = "" in self._of
        if not is_alone and segment.model is not None:
            self._name = segment.model
        self.book.follow(self._latest[self._name])
        plans = self._of[self._name]
        is_known = is_alone and (segment.announced or not plans[0].plan.inputs)
        if segment.model is None and not is_known:
            if not segment.saves_next:
                return None  # a call of the model, or a save, decides
            if not is_alone or all(one.plan.saved and one.plan.saved[0].layer for one in plans):
                segment.aside = True
                return KeepAll()
        return self._policy_of(segment, plans)

    def _policy_of(self, segment: Segment, plans: Sequence[ActivePlan]) -> StepPolicy | None:
        """The step policy of a segment of the last step's model; None if its inputs must be known first."""
        name = self._name
        if name not in self._sets:
            return self._follow(plans[0], plans[0].exact, plans[0].plan.inputs)
        if segment.inputs is None:
            return WithoutPlan(_TOO_EARLY, self._policy_now) if segment.saves_next else None
        found = self.book.choose((name, *segment.inputs), segment.inputs, plans)
        if found is None:
            largest = f"{describe(self._sets[name].largest.inputs)} (the largest plan of {len(plans)})"
            why = f"its inputs: expected at most {largest}, found {describe(segment.inputs)}"
            return WithoutPlan(f"{why}; give one of these shapes to poochplan.plan_set", self._policy_now)
        self._latest[name], indexed = found
        self.book.follow(found[0])
        return self._follow(found[0], indexed)

    def _follow(self, plan: ActivePlan, indexed: IndexedPlan, inputs: Signature = ()) -> Follow:
        """``inputs``: that the step must have, for a plan that was not chosen by them."""
        model, tensors = self._models[self._name], plan.plan.model.tensors
        return Follow(indexed, SwapEach(), self._policy_now, inputs=inputs, model=model, tensors=tensors)

    # -- other plans ------------------------------------------------------------------------------------------

    def replace(self, name: str, plan: Plan) -> None:
        """Steps of that model follow this plan from the next segment on."""
        self._latest[name] = self.book.last = self._put(name, plan)
        self._of[name] = [self._latest[name]]

    def keep(self, plan: ActivePlan, names: Iterable[str]) -> str:
        """Makes the new plan while the training waits, if the profile is known."""
        name: str = plan.kind
        if self._planner is None or name not in self.book.profiles:
            return KEPT_FROM_NOW_ON
        profile = with_kept(self.book.profiles[name], names)
        try:
            changed = self._planner.replan(profile, plan.plan, self._beside_bytes[name])
        except InfeasibleError as error:
            return f"{KEPT_FROM_NOW_ON}: if they are kept, {error}"
        self.book.profiles[name] = profile
        self.replace(name, changed)
        return KEPT_BY_PLAN

    def plan_again(self, plan: ActivePlan, more_bytes: int) -> str:
        """Makes the new plan while the training waits. The next steps follow it."""
        name: str = plan.kind
        why_not = self.book.why_not_again(name)
        if self._planner is None or why_not:
            return why_not or REMEDY
        beside_bytes = self._beside_bytes[name] + more_bytes
        try:
            changed = self._planner.replan(self.book.profiles[name], plan.plan, beside_bytes)
        except InfeasibleError as error:
            return f"with {format_bytes(beside_bytes)} more outside the step {error}"
        self._beside_bytes[name] = beside_bytes
        self.book.times[name] += 1
        self.replace(name, changed)
        return (
            f"from the next step on, steps follow a plan that has room for {format_bytes(beside_bytes)} more "
            f"(predicted: {changed.prediction.overhead:.1%} slower than in-core)"
        )


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
