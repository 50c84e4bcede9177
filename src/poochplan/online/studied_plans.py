"""StudiedPlans: profiles a running loop, has its plans made by another process, and follows them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec
import torch

from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.formats.profile_parts import rounded_up
from poochplan.formats.queries import with_kept
from poochplan.online.known_plans import KnownPlans
from poochplan.planner.arena.reserved import covers_reserved
from poochplan.planner.whatif import with_bytes_beside
from poochplan.profiler.live.step_kinds import PATIENCE, UNUSED, Key, Loop, StepKind
from poochplan.runtime.active_plan import MOST_PLANS, REMEDY, ActivePlan, OverBudget
from poochplan.runtime.applying import check_model
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.messages import Messages
from poochplan.runtime.metering.census import Growth
from poochplan.runtime.metering.watch import GROWS, MostBytes
from poochplan.runtime.plan_source import KEPT_BY_PLAN, KEPT_FROM_NOW_ON, Attached, PlanSource
from poochplan.runtime.step_policies.follow import Follow
from poochplan.runtime.step_policies.step_policy import KeepAll, StepPolicy, SwapEach
from poochplan.torch_private.compiler_internals import is_compiled
from poochplan.units import format_bytes

from . import auto_messages
from .background import BackgroundBuild
from .before_plan import BeforePlan, Unplanned
from .promise import COPIES, Promise
from .ranks import Buckets, RankMessage, Ranks

MISSES = 8
"""After this many segments in a row that diverge from their plan, the kind is studied anew: the loop has changed for
good. After each study twice as many. One that runs more layers than the plan has is enough.
"""
UNMATCHED = 2
"""The same for a plan that no step has followed: another run has made it for other steps."""
CALM = 3
"""After this many segments that need no session it rests."""


class StudiedPlans(PlanSource):
    """State: by kind of segment, the memory outside it, how often it has diverged from its plan, been studied, and been
    planned anew.

    Parameters
    ----------
    loop: what its observer knows of it.
    known: profiles and plans.
    build: the allocator's build; nothing is profiled before it is done.
    before: for segments without a plan.
    """

    def __init__(
        self, loop: Loop, known: KnownPlans, build: BackgroundBuild, before: BeforePlan, messages: Messages
    ) -> None:
        self.loop, self.book = loop, known.book
        self._known, self._build, self._before, self._messages = known, build, before, messages
        self._is_one_region = is_compiled(loop.model)
        self._ranks: Ranks | None = None
        self._buckets = Buckets()
        self._began_s = self._took_s = 0.0
        """When the open segment began, and how long it took up to the optimizer's step; 0 without one."""
        self._promises: dict[Key, Promise] = {}
        self._beside = defaultdict[Key, Growth](Growth)
        self._missed, self._studies = Counter[Key](), Counter[Key]()
        self._matched = set[Key]()
        """Kinds of which a step has followed the present plan."""
        self._improved, self._without_arena = Counter[Key](), Counter[Key]()
        """How often a kind was planned anew: to wait less for copies, to have an arena."""
        self._calm = self._calm_since = 0
        """How many segments in a row need no session (no plan is to come for them, or theirs moves nothing), and how
        often optimizers had stepped before them."""
        self._saved_bytes = 0
        """The most that one of them has saved."""
        self._is_calm = self._is_unplanned = False
        """Whether the open segment is one, and whether some of them have no plan."""
        self._woken_bytes = 0.0
        """What steps may take before the session wakes another time."""
        self._arena_room_bytes = Counter[Key]()
        """Bytes by which the arenas of real steps have been larger than planned, all plans of a kind together."""

    def attached(self, attachment: Attached) -> None:
        self._attachment = attachment
        self._before.attached(attachment)
        self._ranks = Ranks.of(attachment.models.values())
        if self._ranks is not None:
            self._known.take_smallest(self._ranks)
        self._messages.is_quiet |= not self._is_planner
        if self._is_one_region:
            self._messages.say(auto_messages.ONE_REGION)
        elif self._before.before is Unplanned.IN_CORE:
            self._messages.say(auto_messages.IN_CORE)

    def close(self) -> None:
        self._known.keep_for_the_next_run(self.loop.kinds.alike)
        if any(key not in self.book.active for key in self._known.pending):
            self._messages.say(auto_messages.ENDED_UNPLANNED)
        elif not self.book.profiles and self.loop.is_studied:
            self._messages.say(auto_messages.ENDED_UNPROFILED)
        elif not self.book.profiles and {kind.refused for kind in self.loop.kinds.values()} == {UNUSED}:
            self._messages.say(auto_messages.NO_BACKWARD)
        self._known.pending.close()
        self._messages.end()
        self._leave_ranks()

    def _leave_ranks(self) -> None:
        """From now on this rank plans for itself."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def wait(self, timeout_s: float | None) -> bool:
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._build.wait(timeout_s)
        self._known.wait(end_s)
        return self._take_ready() if self._ranks is None else self._tell_ranks(even_nothing=True)

    # -- plans for segments ---------------------------------------------------------------------------------------

    def known(self, own: Key, segment: Segment) -> StepPolicy | None:
        """None if the segment is to be studied. Between two segments it also takes over plans that are done, and
        pauses for work in the background.
        """
        self.book.following, self._is_calm, self.limit_bytes = None, False, 0
        if self._ranks is not None and self._ranks.are_uneven():
            self._leave_ranks()
        if self._ranks is not None:
            self._ranks.saw(own)
        if self._is_one_region:
            return self._before.policy()
        if not self._build.is_ready:
            self._known.pauses.spend(self._build.wait)
        if not self._build.is_ready:  # nothing can be profiled before the allocator counts
            return self._before.policy()
        if not self._buckets.are_final(self._attachment.models.values(), segment.number):
            return self._before.policy()
        key = self.loop.kinds.key_of(own)
        self._known.poll()
        if self._is_planner:
            self._known.look_up(key, self.loop.foreseen_bytes)
        if self._ranks is None:
            self._take_ready()
        waits = key in self._known.pending and key not in self.book.active
        if waits or key in self._known.refused:
            return self._without_plan(key, self.book.profiles[key], is_refused=key in self._known.refused)
        beside = (one for kind, one in self.book.active.items() if kind.is_beside(key) and one.plan.inputs)
        found = self.book.choose(key, key.inputs, beside)
        if found is None:
            return None if self._is_planner else self._before.policy()
        plan, indexed = found
        if self._is_outgrown(plan, segment.number):
            return SwapEach(at_once=True)
        self.book.follow(plan)
        self._began_s, self._took_s = time.perf_counter(), 0.0
        self._is_calm = _keeps_all(plan.plan)
        return Follow(indexed, SwapEach())

    def policy(self, kind: StepKind | None) -> StepPolicy:
        """The policy before there is a plan, and if there will be none."""
        if kind is None:
            return self._before.policy()
        budget_bytes = self._known.budget_bytes if kind.varies else 0  # no share of a peak that varies too
        bound = self._before.within(budget_bytes) if budget_bytes else None
        if bound is not None:
            self._is_calm, self.limit_bytes = not self._before.is_bound, budget_bytes
            self.limits_reserved = covers_reserved(self._known.on, is_known=self._before.knows_reserved)
            return bound
        policy = self._without_plan(kind.key, kind.profile, is_refused=bool(kind.refused))
        self._is_calm = not kind.is_studied and not self.is_planning(kind)
        return policy

    def _without_plan(self, key: Key, profile: Profile | None, *, is_refused: bool) -> StepPolicy:
        """Keeps all values if that is known to fit the budget, and swaps if the budget was guaranteed."""
        self._is_calm = is_refused
        if profile is not None and self._known.in_core_bytes(profile) <= self._known.budget_of(profile):
            return KeepAll()
        if not is_refused and key in self.book.had_plan:
            return SwapEach(at_once=True)
        return self._before.policy(is_refused=is_refused)

    # -- when nothing is to come ------------------------------------------------------------------------------

    def rests(self) -> MostBytes | None:
        """After a few segments in a row that need no session; after more while some kind of segment is being studied.
        Where a kind has no plan, the budget is not kept, which was told.
        """
        if self._ranks is not None or (self._calm < CALM and not self._is_one_region) or not self._build.is_ready:
            return None
        known, is_studied = self._known, self.loop.is_studied and self._calm < PATIENCE
        plans = [one.plan for one in self.book.active.values()]
        has_stepped = self.loop.steps - self._calm_since > 1 or not self.loop.steps or self._is_one_region
        if is_studied or not has_stepped or known.pending or known.ready or not all(map(_keeps_all, plans)):
            return None
        if self._before.is_bound:
            return None
        is_kept = (bool(plans) and not self._is_unplanned) or self._keeps_limit
        is_in_core = not self._is_one_region or self._before.before is Unplanned.IN_CORE
        if not (is_kept and plans) and not (is_in_core and self._before.is_plentiful(self._saved_bytes)):
            return None
        self._calm, self._is_unplanned = 0, False
        if self._keeps_limit:
            return MostBytes(known.budget_bytes, is_kept)
        budget_bytes = max((plan.usable_bytes for plan in plans), default=0) or known.budget_bytes
        return MostBytes(max(budget_bytes, self._woken_bytes), is_kept)

    @property
    def _keeps_limit(self) -> bool:
        """Whether all kinds without a plan keep within the budget."""
        refused = [kind for kind in self.loop.kinds.values() if kind.refused]
        is_all = all(kind.varies for kind in refused) and not self._known.refused
        return bool(refused) and is_all and bool(self._known.budget_bytes) and self._before.can_bind

    def wakes(self, peak_bytes: int) -> str:
        """Steps follow their plans again, or are looked at again to find kinds that were not there before."""
        self._woken_bytes = GROWS * peak_bytes
        self._matched.clear()  # steps may have changed long since
        for plan in self.book.active.values():
            plan.check_next()
        if self.book.active:  # if it really exceeds its budget, that is told, and another plan is made
            return ""
        if self._keeps_limit:
            self._before.is_bound = True
            return auto_messages.bound(peak_bytes, self._known.budget_bytes)
        return auto_messages.grown(peak_bytes)

    def ended(self, segment: Segment) -> None:
        self._calm = self._calm + 1 if self._is_calm and not segment.diverged else 0
        self._calm_since = self._calm_since if self._calm else self.loop.steps
        self._is_unplanned = self._calm > 0 and (self._is_unplanned or self.book.following is None)
        self._saved_bytes = max(self._saved_bytes, segment.saved_bytes)
        plan = self.book.following
        if plan is None or segment.outcome not in (Outcome.USED, Outcome.LEFT_OVER):
            return
        key = plan.kind
        self._missed[key] = self._missed[key] + 1 if segment.diverged else 0
        is_longer = segment.diverged and segment.saved_values > len(plan.plan.saved)
        self._matched |= set() if segment.diverged else {key}
        is_other = self._missed[key] >= (MISSES << self._studies[key] if key in self._matched else UNMATCHED)
        if (is_longer or is_other) and self._ranks is None:
            self._studies[key] += 1
            self._missed[key] = 0
            self._matched.discard(key)
            self._known.leave(key, plan)
            self.loop.kinds.study_again(key, segment.saved_values if is_longer else 0)
            self._messages.say(auto_messages.LEFT)
        elif self._took_s and not segment.diverged:
            self._report_if_slower(key, plan, segment)

    def _report_if_slower(self, key: Key, plan: ActivePlan, segment: Segment) -> None:
        """Reports, once, steps that are slower than predicted. If copies are the reason, a new plan swaps less."""
        promise = self._promises.get(key)
        if promise is None or promise.plan is not plan.plan:
            promise = self._promises[key] = Promise(plan.plan)
        why, profile = promise.took(self._took_s, segment.report), self.book.profiles.get(key)
        if not why:
            return
        again = why == COPIES and profile is not None and not self._improved[key]
        promised_s = plan.plan.prediction.step_s
        self._messages.say(auto_messages.dearer(promise.step_s, promised_s, why, is_planned_again=again))
        if again and profile is not None:
            self._improved[key] += 1
            self._want_meanwhile(key, msgspec.structs.replace(profile, link=promise.link_found(plan.plan.link)))

    def lacks_arena(self, plan: ActivePlan, more_bytes: int) -> None:
        """Plans with room for the arena: a stored plan may be of a loop that held outputs for another time. The other
        plan's decisions need another arena, which may lack bytes again.
        """
        key = plan.kind
        profile, is_pending = self.book.profiles.get(key), key in self._known.pending
        if profile is None or self._without_arena[key] == MOST_PLANS or self._ranks is not None or is_pending:
            return
        self._without_arena[key] += 1
        self._arena_room_bytes[key] += rounded_up(more_bytes)
        self._messages.say(auto_messages.lacks_arena(more_bytes))
        self._want_meanwhile(key, profile)

    def _want_meanwhile(self, key: Key, profile: Profile) -> None:
        """Another plan; until it is there, steps follow the present one. The profile has the bytes ahead already."""
        self._known.doubted.add(key)
        self._known.want(key, profile, 0, arena_room_bytes=self._arena_room_bytes[key])

    # -- making plans ---------------------------------------------------------------------------------------------

    def profiled(self, kind: StepKind) -> None:
        """Has the profile planned, or says why there is no plan."""
        profile = kind.profile
        if profile is None:
            if kind.refused != UNUSED:  # there is nothing to plan
                is_bound = kind.varies and self._before.can_bind
                bound_bytes = self._known.budget_bytes if is_bound else 0
                self._messages.warn(auto_messages.without_plan(kind.refused, self._before.refused, bound_bytes))
            return
        beside = self._beside[kind.key] = kind.growth
        ahead_bytes = beside.ahead_bytes(self._attachment.engine.segment.number, kind.foreseen_bytes)
        is_wanted = self._known.want(kind.key, profile, ahead_bytes)
        if is_wanted:
            self._messages.say(auto_messages.profiled(kind.segments, len(self.book.profiles)))
        if is_wanted or self._known.is_refused_whatever_lives(kind.key):
            self._known.keep(kind.key, profile)

    def is_planning(self, kind: StepKind) -> bool:
        return kind.key in self._known.pending

    def plan_again(self, plan: ActivePlan, more_bytes: int) -> str:
        """Plans in the other process; segments swap until the plan is ready. Ranks get no new plan, because each has
        measured its own bytes: they continue together as before.
        """
        why_not = REMEDY if self._ranks is not None else self.book.why_not_again(plan.kind)
        if not why_not:
            self._want_another(plan.kind, more_bytes)
        return why_not or f"another plan is made that has room for {format_bytes(more_bytes)} more"

    def keep(self, plan: ActivePlan, names: Iterable[str]) -> str:
        """Plans in the other process; until then steps follow the present plan, but keep these values."""
        key = plan.kind
        profile = self.book.profiles.get(key)
        if profile is None or self._ranks is not None:
            return KEPT_FROM_NOW_ON
        self._want_meanwhile(key, with_kept(profile, names))
        return KEPT_BY_PLAN if key in self._known.pending else KEPT_FROM_NOW_ON

    def _want_another(self, key: Key, more_bytes: int) -> None:
        self.book.times[key] += 1
        self.book.withdraw(key)
        profile = with_bytes_beside(self.book.profiles[key], more_bytes)
        number = self._attachment.engine.segment.number
        ahead_bytes = self._beside[key].ahead_bytes(number, self.loop.foreseen_bytes)
        self._known.want(key, profile, ahead_bytes, arena_room_bytes=self._arena_room_bytes[key])

    def _is_outgrown(self, plan: ActivePlan, number: int) -> bool:
        """Whether the memory outside the step now makes the plan exceed its budget. If so, another plan is made, unless
        it grows on and on: then the step is reported that exceeds its budget.
        """
        key, beside = plan.kind, self._beside[plan.kind]
        is_due = plan.is_due or beside.is_due(number)
        if self._known.policy is not OverBudget.REPLAN or not is_due or self.book.why_not_again(key):
            return False
        more_bytes = beside.outgrown(number, self.book.profiles[key], plan.plan, self.loop.where.type)
        if more_bytes:
            self._messages.say(auto_messages.OUTGROWN)
            self._want_another(key, more_bytes)
        return bool(more_bytes)

    # -- ranks ----------------------------------------------------------------------------------------------------

    @property
    def _is_planner(self) -> bool:
        return self._ranks is None or self._ranks.is_first

    @property
    def _is_all_planned(self) -> bool:
        known = self._known
        return bool(self.book.active or known.ready) and not known.pending and not self.loop.is_studied

    @property
    def _is_settled(self) -> bool:
        """Whether nothing is profiled or planned, and something has been, or nothing ever will be."""
        is_idle = not self._known.pending and not self.loop.is_studied
        return self._is_one_region or (is_idle and bool(self.book.profiles or self.book.active))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Ranks share their plans here, because all of them have come to the same step."""
        if self.loop.steps == 1 and self._attachment.is_resting:  # what seemed to be all steps is a part of one
            self._attachment.wakes_next()
        self._took_s = time.perf_counter() - self._began_s
        if self._ranks is not None and self._ranks.are_due():
            self._known.poll()
            self._tell_ranks()

    def _take_ready(self) -> bool:
        """Activates finished plans. Returns whether there are no more for now."""
        ready, self._known.ready = self._known.ready, []
        for key, plan in ready:
            self._known.activate(key, plan)
        return self._is_all_planned

    def _tell_ranks(self, *, even_nothing: bool = False) -> bool:
        """All ranks follow the plans that rank 0 has made. Returns whether rank 0 has no more for now."""
        assert self._ranks is not None
        ready, is_settled = self._known.ready, self._is_settled
        is_news = bool(ready) or is_settled is not self._ranks.is_settled
        tells = self._ranks.is_first and (is_news or even_nothing)
        message = RankMessage(ready, self.loop.kinds.alike, self._is_all_planned, is_settled) if tells else None
        shared = self._ranks.share(message)
        self._known.ready = []
        if shared is None:
            return False
        self.loop.kinds.take(shared.alike)
        for key, plan in shared.plans:
            check_model(plan.model, self.loop.model, "plan of rank 0")
            self._known.activate(key, plan)
        return shared.is_all


def _keeps_all(plan: Plan) -> bool:
    """Whether steps that follow the plan are ordinary ones."""
    return all(value.decision is Decision.KEEP for value in plan.values if not value.source)
