"""KnownPlans: fills the plan book of a running loop, by plans that another process makes, or that are in the cache."""

from __future__ import annotations

import contextlib
import time

import msgspec

from poochplan.errors import InfeasibleError, PoochError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Kind, Profile
from poochplan.formats.profile_parts import MOST_BYTES, rounded_up
from poochplan.formats.queries import in_flight_bytes
from poochplan.online.plan_cache import PlanCache
from poochplan.planner.arena.reserved import in_core_bytes
from poochplan.planner.planning import NO_EVALUATOR, smallest_budget
from poochplan.planner.simulator.evaluator import untold_absence
from poochplan.planner.whatif import with_bytes_beside
from poochplan.profiler.live.step_kinds import Key
from poochplan.runtime.active_plan import ActivePlan, OverBudget
from poochplan.runtime.messages import Messages
from poochplan.runtime.metering.census import left_free
from poochplan.runtime.plan_book import PlanBook
from poochplan.units import parse_budget

from .auto_messages import KNOWN, activated, infeasible, not_planned
from .background import BackgroundPlan, PlanQueue
from .before_plan import PauseBudget, Unplanned
from .planning_process import PlanRequest
from .ranks import Ranks


class KnownPlans:
    """State: the plan book, by kind of segment (``book``), plans being made (``pending``), and more below.

    Parameters
    ----------
    budget: as the user gave it.
    request: how all kinds are planned.
    policy: whether a budget that no plan fits is an error.
    on_refusal: how steps continue if no plan fits.
    measures_here: whether the training process may measure the machine. That takes some megabytes; a budget that is
        kept from the first step on has no room for them.
    """

    def __init__(
        self,
        budget: str | int | float,
        request: PlanRequest,
        cache: PlanCache,
        messages: Messages,
        policy: OverBudget,
        on_refusal: Unplanned,
        *,
        measures_here: bool,
    ) -> None:
        self.policy, self.on_refusal, self.on = policy, on_refusal, request.on
        self._budget, self._request = budget, request
        self.book = PlanBook()
        self.ready: list[tuple[Key, Plan]] = []
        """Plans that were found and are not active yet. With data-parallel ranks, all ranks activate them at once."""
        self._cache, self._messages = cache, messages
        self.pauses = PauseBudget()
        self.pending = PlanQueue(self.pauses, measures_here=measures_here)
        self.refused: dict[Key, int] = {}
        """Kinds that no plan fits, with the smallest budget of each."""
        self.doubted: set[Key] = set()
        """Kinds whose active plan predicts wrongly: the next plan replaces it, whatever that one predicts."""
        self._in_core: dict[tuple[str, int], int] = {}
        """In-core peaks of what the budget covers, by a profile's ops and its peak: one may take a simulation."""
        self._looked_up: set[Key] = set()
        self._smallest_bytes = 0
        """The largest of the smallest possible budgets that were reported."""

    @property
    def budget_bytes(self) -> int:
        """The budget if it was given in bytes; 0 if it is a share."""
        found = {parse_budget(self._budget, peak_bytes) for peak_bytes in (1 << 40, 1 << 41)}
        return found.pop() if len(found) == 1 else 0

    def budget_of(self, profile: Profile) -> int:
        """The budget in bytes, for the segments of a profile."""
        return parse_budget(self._budget, self.in_core_bytes(profile))

    def in_core_bytes(self, profile: Profile) -> int:
        """The in-core peak of what the budget covers."""
        key = profile.ops_fingerprint, profile.in_core_peak_bytes  # inputs of several sizes have the same ops
        if key not in self._in_core:
            self._in_core[key] = in_core_bytes(profile, self._request.on)
        return self._in_core[key]

    def take_smallest(self, ranks: Ranks) -> None:
        """From now on the budget is the smallest of all ranks, which follow one plan. Bytes are less than any share."""
        self._budget = min(ranks.gathered(self._budget), key=lambda one: parse_budget(one, MOST_BYTES))
        self._cache.budget = self._budget

    def is_refused_whatever_lives(self, key: Key) -> bool:
        """Whether no plan would fit that kind even if none of its inputs were alive. The next run will then fail in the
        same way.
        """
        if key not in self.refused:
            return False
        profile = self.book.profiles[key]
        inputs_bytes = sum(rounded_up(value.size_bytes) for value in profile.values if value.kind is Kind.INPUT)
        return self.refused[key] - inputs_bytes > self.budget_of(profile)

    def wait(self, end_s: float | None) -> None:
        """Waits until no plan is being made, or until that time of the monotonic clock. Finished plans become
        active.
        """
        while self.pending and (end_s is None or time.monotonic() < end_s):
            self.pending.wait(None if end_s is None else max(0.0, end_s - time.monotonic()))
            self.poll()

    # -- where plans come from --------------------------------------------------------------------------------

    def want(self, key: Key, profile: Profile, ahead_bytes: int, *, arena_room_bytes: int = 0) -> bool:
        """Requests a plan and returns whether one is being made now. If not, a message says why. ``ahead_bytes`` count
        as taken, since the loop will grow by them, and the plan leaves room for collectives in flight; both as far as
        the budget has room. ``arena_room_bytes``: by which the arena of real steps is larger than planned.

        Raises ``InfeasibleError`` if no plan fits and the policy is an error.
        """
        self.book.profiles[key] = profile
        budget_bytes = self.budget_of(profile)
        smallest_bytes = smallest_budget(profile, arena=self._request.arena)
        if smallest_bytes > budget_bytes:
            self.refused[key] = smallest_bytes
            self._tell_infeasible(profile, budget_bytes, smallest_bytes)
            return False
        taken_bytes = left_free(ahead_bytes, budget_bytes - smallest_bytes)
        room_bytes = left_free(in_flight_bytes(profile), budget_bytes - smallest_bytes - taken_bytes)
        arena_room_bytes = left_free(arena_room_bytes, budget_bytes - smallest_bytes - taken_bytes - room_bytes)
        if taken_bytes:
            profile = self.book.profiles[key] = with_bytes_beside(profile, taken_bytes)
        request = msgspec.structs.replace(
            self._request,
            budget_bytes=budget_bytes,
            room_bytes=room_bytes,
            arena_room_bytes=arena_room_bytes,
            loop_s=self.pauses.age_s,
        )
        try:
            self.pending[key] = BackgroundPlan(profile, request)
        except OSError as error:
            self._messages.warn(not_planned(f"planning could not begin ({error.strerror})"))
        return key in self.pending

    def _tell_infeasible(self, profile: Profile, budget_bytes: int, smallest_bytes: int) -> None:
        if smallest_bytes <= self._smallest_bytes:
            return
        self._smallest_bytes = smallest_bytes
        text = infeasible(profile, budget_bytes, smallest_bytes, self.on_refusal)
        if self.policy is OverBudget.ERROR:
            raise InfeasibleError(text, smallest_budget_bytes=smallest_bytes)
        self._messages.warn(text)

    def poll(self) -> None:
        """Finds the plans that were finished since the last call."""
        self.pending.go_on()
        for key, pending in self.pending.take_done():
            try:
                plan = pending.plan()
                self.book.profiles[key] = pending.profile()
                self.keep(key, self.book.profiles[key], plan)
                self._found(key, plan)
            except PoochError as error:
                self._messages.warn(not_planned(str(error)))
            finally:
                pending.close()

    def look_up(self, key: Key, ahead_bytes: int) -> None:
        """Finds what an earlier run has stored for that kind, once. A profile without a plan is planned, or refused
        again.
        """
        if key in self._looked_up or key in self.book.active:
            return
        self._looked_up.add(key)
        profile, plan = self._cache.find(key) or (None, None)
        if profile is not None and plan is not None:
            self.book.profiles[key] = profile
            self._found(key, plan)
        elif profile is not None and self.want(key, profile, ahead_bytes):
            self._messages.say(KNOWN)

    def _found(self, key: Key, plan: Plan) -> None:
        if NO_EVALUATOR in plan.notes:
            self._tell_of_evaluator()
        followed = self.book.active.get(key)
        is_better = followed is None or followed.plan.prediction.step_s > plan.prediction.step_s  # equal: the first
        if is_better or key in self.doubted:
            self.doubted.discard(key)
            self.ready.append((key, plan))

    # -- active plans, and cached plans -----------------------------------------------------------------------

    def _tell_of_evaluator(self) -> None:
        """Says once why there is no evaluator, as soon as that is known."""
        if line := untold_absence():
            self._messages.warn(line)

    def activate(self, key: Key, plan: Plan) -> None:
        """Segments of that kind follow the plan from now on."""
        self.book.withdraw(key)
        self.book.put(key, plan)
        self._messages.say(activated(plan))

    def leave(self, key: Key, plan: ActivePlan) -> None:
        """Steps differ from the plan. It stays stored, because it may fit another run; another one is looked up."""
        self.book.leave(plan)
        self._looked_up.discard(key)
        self._cache.leave(key)

    def keep(self, key: Key, profile: Profile, plan: Plan | None = None) -> None:
        """Stores them for the next run, which makes the plan if there is none yet."""
        if line := self._cache.keep(key, profile, plan):
            self._messages.warn(line)

    def keep_for_the_next_run(self, alike: list[tuple[Key, Key]]) -> None:
        """Stores plans that no step has followed yet, and which kinds are alike. The next run cannot find the latter by
        comparison.
        """
        if any(NO_EVALUATOR in active.plan.notes for active in self.book.active.values()):
            self._tell_of_evaluator()
        for key, pending in self.pending.take_done():
            with contextlib.suppress(PoochError):
                profile, plan = pending.profile(), pending.plan()
                self.book.profiles[key] = profile
                self.keep(key, profile, plan)
            pending.close()
        for key, active in self.book.active.items():
            if not active.has_exceeded:
                self._cache.was_right(key)
        for key, like in alike:
            if like in self.book.active and like in self.book.profiles:
                self.keep(key, self.book.profiles[like], self.book.active[like].plan)
            elif self.is_refused_whatever_lives(like):
                self.keep(key, self.book.profiles[like])
