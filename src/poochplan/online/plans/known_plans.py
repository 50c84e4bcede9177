"""KnownPlans: the plans of a running loop, by kind of segment: under way, found in the cache, in force; or why none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from poochplan.errors import InfeasibleError, PoochError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.online.before_plan import Unplanned
from poochplan.online.earned import Earned
from poochplan.online.telling import KNOWN, Teller, in_force, infeasible, not_planned
from poochplan.planner.planning import smallest_budget
from poochplan.planner.whatif import with_bytes_beside
from poochplan.profiler.live.lines import Key
from poochplan.runtime.budget_watch import OverBudget
from poochplan.runtime.serving import ArenaMode
from poochplan.units import parse_budget

from .background import Background, Plannings
from .plan_cache import PlanCache
from .planning_process import Asked
from .ways import Way, Ways


class KnownPlans:
    """State: profiles, plans under way and plans in force (``ways``), and the kinds that no plan fits.

    Parameters
    ----------
    budget: as the user gave it.
    arena: what plans are made for.
    policy: whether a budget that no plan fits is an error.
    dropped: told a plan that is not in force any more.
    refused: how steps go on that no plan fits.
    spill_dir: of the link, which is measured where a profile has none.
    """

    def __init__(
        self,
        budget: str | int | float,
        time_limit_s: float,
        arena: ArenaMode,
        policy: OverBudget,
        teller: Teller,
        dropped: Callable[[Plan], None],
        refused: Unplanned,
        spill_dir: str | None,
    ) -> None:
        self.ways = Ways()
        self.profiles: dict[Key, Profile] = {}
        self.ready: list[tuple[Key, Plan]] = []
        """Where there are ranks: found, and in force once all of them have been told."""
        self.is_shared = False
        """Whether there are ranks."""
        self.cache: PlanCache | None = None
        """There is one from before the first segment on."""
        self._budget, self._time_limit_s, self._arena = budget, time_limit_s, arena
        self._spill_dir = spill_dir
        self._policy, self._teller, self._dropped, self._refused = policy, teller, dropped, refused
        self.earned = Earned()
        self._pending = Plannings(self.earned)
        self._hopeless: set[Key] = set()
        self._promised: set[Key] = set()
        self._looked_up: set[Key] = set()
        self._smallest_bytes = 0
        """The largest of the smallest possible budgets that were told."""

    def budget_of(self, profile: Profile) -> int:
        """In bytes, for the segments of a profile."""
        return parse_budget(self._budget, profile.in_core_peak_bytes)

    @property
    def is_planning(self) -> bool:
        """Whether a plan is under way."""
        return bool(self._pending)

    def is_under_way(self, key: Key) -> bool:
        """Whether the plan for that kind is."""
        return key in self._pending

    def waits_in_vain(self, key: Key) -> bool:
        """Whether that kind is profiled, and has no plan: not yet, or never."""
        return (key in self._pending and key not in self.ways) or key in self._hopeless

    def is_promised(self, key: Key) -> bool:
        """Whether that kind has had a plan: its budget is kept from there on."""
        return key in self._promised

    def is_refused(self, key: Key) -> bool:
        """Whether no plan fits that kind."""
        return key in self._hopeless

    @property
    def is_any_without(self) -> bool:
        """Whether a kind waits for its first plan."""
        return any(key not in self.ways for key in self._pending)

    def wait(self, end_s: float | None) -> None:
        """Until no plan is under way, or until then by the monotonic clock; those that are made are in force."""
        while self._pending and (end_s is None or time.monotonic() < end_s):
            self._pending.wait(None if end_s is None else max(0.0, end_s - time.monotonic()))
            self.poll()

    # -- where plans come from --------------------------------------------------------------------------------

    def want(self, key: Key, profile: Profile, ahead: Callable[[int, int], int]) -> bool:
        """Whether one is under way now; it is said why not. ``ahead``: how many bytes are to be left free for growth,
        of a budget and the smallest possible one.

        Raises ``InfeasibleError`` where there is none and that is the policy.
        """
        self.profiles[key] = profile
        budget_bytes = self.budget_of(profile)
        smallest_bytes = smallest_budget(profile, arena=self._arena)
        if smallest_bytes > budget_bytes:
            self._hopeless.add(key)
            self._tell_infeasible(profile, budget_bytes, smallest_bytes)
            return False
        ahead_bytes = ahead(budget_bytes, smallest_bytes)
        if ahead_bytes:
            profile = self.profiles[key] = with_bytes_beside(profile, ahead_bytes)
        try:
            self._pending[key] = Background(
                profile, Asked(budget_bytes, self._time_limit_s, self._arena, self._spill_dir)
            )
        except OSError as error:
            self._teller.warn(not_planned(f"planning could not begin ({error.strerror})"))
        return key in self._pending

    def _tell_infeasible(self, profile: Profile, budget_bytes: int, smallest_bytes: int) -> None:
        if smallest_bytes <= self._smallest_bytes:
            return
        self._smallest_bytes = smallest_bytes
        text = infeasible(profile, budget_bytes, smallest_bytes, self._refused)
        if self._policy is OverBudget.ERROR:
            raise InfeasibleError(text, smallest_budget_bytes=smallest_bytes)
        self._teller.warn(text)

    def poll(self) -> None:
        """What has been planned meanwhile is found now."""
        for key, pending in self._pending.take_done():
            try:
                plan = pending.plan()
                self.profiles[key] = pending.profile()
                self._keep(key, plan)
                self._found(key, plan)
            except PoochError as error:
                self._teller.warn(not_planned(str(error)))
            finally:
                pending.close()

    def look_up(self, key: Key, ahead: Callable[[int, int], int]) -> None:
        """What an earlier run has kept for that kind is found, once; its profile is planned where that is all."""
        if key in self._looked_up or key in self.ways or self.cache is None:
            return
        self._looked_up.add(key)
        profile, plan = self.cache.find(key) or (None, None)
        if profile is not None and plan is not None:
            self.profiles[key] = profile
            self._found(key, plan)
        elif profile is not None and self.want(key, profile, ahead):
            self._teller.say(KNOWN)

    def _found(self, key: Key, plan: Plan) -> None:
        followed = self.ways.get(key)
        if followed is not None and followed.plan.prediction.step_s <= plan.prediction.step_s:
            return  # found first, and no worse
        if self.is_shared:
            self.ready.append((key, plan))
        else:
            self.put_in_force(key, plan)

    # -- what is in force, and what is kept -------------------------------------------------------------------

    def put_in_force(self, key: Key, plan: Plan) -> None:
        """Segments of that kind follow it from now on."""
        self.withdraw(key)
        self.ways[key] = Way.of(key, plan)
        self._teller.say(in_force(plan))

    def withdraw(self, key: Key) -> None:
        """That kind has no plan any more."""
        way = self.ways.pop(key, None)
        if way is not None:
            self._promised.add(key)
            self._dropped(way.plan)

    def leave(self, key: Key) -> None:
        """As :meth:`withdraw`. What is kept stays, for it may be right for another run; another one is looked for."""
        self.withdraw(key)
        self._looked_up.discard(key)
        if self.cache is not None:
            self.cache.leave(key)

    def keep_profile(self, key: Key, profile: Profile) -> None:
        """The next run goes on from it."""
        if self.cache is not None:
            self.cache.keep(key, profile)

    def _keep(self, key: Key, plan: Plan) -> None:
        if self.cache is not None:
            self.cache.keep(key, self.profiles[key], plan)

    def keep_for_the_next_run(self, alike: list[tuple[Key, Key]]) -> None:
        """Plans that nobody has followed yet, and which kinds are alike: it has nothing to compare them with."""
        for key, profile, plan in self._done():
            self.profiles[key] = profile
            self._keep(key, plan)
        for key in self.ways:
            if self.cache is not None:
                self.cache.was_right(key)
        for key, like in alike:
            if like in self.ways and like in self.profiles and self.cache is not None:
                self.cache.keep(key, self.profiles[like], self.ways[like].plan)

    def close(self) -> None:
        """Planning ends."""
        self._pending.close()

    def _done(self) -> Iterator[tuple[Key, Profile, Plan]]:
        for key, pending in self._pending.take_done():
            with contextlib.suppress(PoochError):
                yield key, pending.profile(), pending.plan()
            pending.close()
