"""PlansFollower: what becomes of the segments of a loop that are not studied: they follow a plan, or wait for one."""

from __future__ import annotations

from poochplan.formats.profile import Profile
from poochplan.planner.whatif import with_bytes_beside
from poochplan.profiler.live.lines import UNUSED, Key, Line
from poochplan.profiler.live.loop import Follower, Loop
from poochplan.profiler.live.watch import Watch
from poochplan.runtime.budget_watch import BudgetWatch, OverBudget
from poochplan.runtime.drivers.driver import Driver
from poochplan.runtime.drivers.follow import Follow
from poochplan.runtime.drivers.keep_all import KeepAll
from poochplan.runtime.drivers.swap_each import SwapEach
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.model_check import check_model
from poochplan.runtime.run_report import StepReport
from poochplan.runtime.watch.growth import foreseen_bytes
from poochplan.runtime.watch.keeper import described as moment_in_words
from poochplan.runtime.watch.keeper import held_beside
from poochplan.runtime.watch.step_meter import StepMeter

from .adherence import Adherence
from .before_plan import BeforePlan
from .following import Beside, Metered, left_free
from .plans.known_plans import KnownPlans
from .plans.ways import Way
from .ranks import Ranks, Shared
from .served_segments import ServedSegments
from .telling import LEFT, OUTGROWN, Teller, host_is_full, profiled, without_plan


class PlansFollower(Follower):
    """State: which plan the open segment follows, how segments keep to theirs, and what they took in all.

    Parameters
    ----------
    known: profiles and plans.
    policy: what becomes of a segment that takes more than its budget.
    """

    def __init__(
        self,
        known: KnownPlans,
        served: ServedSegments,
        meter: StepMeter,
        policy: OverBudget,
        teller: Teller,
    ) -> None:
        self.total = StepReport()
        self.current: Way | None = None
        """That was followed last."""
        self.adherence = Adherence()
        self.ranks: Ranks | None = None
        self.loop: Loop
        self.before: BeforePlan
        """There are both from before the first segment on."""
        self._known, self._served, self._meter, self._teller = known, served, meter, teller
        self._policy = policy
        self._watch = BudgetWatch(OverBudget.ERROR if policy is OverBudget.ERROR else OverBudget.WARN)
        self._following: Way | None = None
        """Of the open segment."""

    @property
    def is_all_planned(self) -> bool:
        """Whether every profiled kind of segment has its plan."""
        studied = any(line.is_studied for line in self.loop.lines.values())
        return bool(self._known.ways or self._known.ready) and not self._known.is_planning and not studied

    def known(self, key: Key) -> Driver | Watch | None:
        self._following = None
        found = self._known_driver(key)
        self._served.begins(self.loop.engine.segment, self._following and self._following.plan)
        return found

    def _known_driver(self, key: Key) -> Driver | Watch | None:
        if not self._served.is_ready:
            self._known.earned.spend(self._served.wait_until_ready)
        if not self._served.is_ready:  # nothing can be profiled before the allocator counts
            return self.before.driver()
        known = self._known
        known.poll()
        if self.is_planner:
            known.look_up(key, lambda budget, smallest: self._left_free(self._foreseen_bytes, budget, smallest))
        if known.waits_in_vain(key):
            return self._without_plan(key, self._known.profiles[key], is_refused=known.is_refused(key))
        found = self._known.ways.choose(key)
        if found is None:
            return None if self.is_planner else self.before.driver()
        way, course = found
        beside, is_due = self.adherence.beside(way.key), self.adherence.is_metered(way.key)
        if (is_due or beside.is_due(self._number)) and self._is_outgrown(way, beside):
            return SwapEach(at_once=True)
        self._make_room(way)
        self.current = self._following = way
        is_new = self.adherence.is_new(way.key)
        self.adherence.begins(way.key)
        driver = Follow(course, SwapEach())
        tells_every_step = self._meter.tells_every_step or self.loop.engine.device.step_peak_bytes() is not None
        if not is_due and not tells_every_step:  # ops would have to
            return driver
        self._meter.settled(not is_new)
        if is_due:
            self._meter.check_next()
        return Metered(self.loop.scene, driver, self._meter, self.loop.engine, way.plan)

    def driver(self, line: Line | None) -> Driver:
        """Until there is a plan, and where there will be none."""
        if line is None:
            return self.before.driver()
        return self._without_plan(line.key, line.profile, is_refused=bool(line.refused))

    def _without_plan(self, key: Key, profile: Profile | None, *, is_refused: bool) -> Driver:
        """Keeps all where that is known to fit the budget, and swaps where the budget was promised."""
        if profile is not None and profile.in_core_peak_bytes <= self._known.budget_of(profile):
            return KeepAll()
        if is_refused:
            return self.before.refused_driver()
        return SwapEach(at_once=True) if self._known.is_promised(key) else self.before.driver()

    def profiled(self, line: Line) -> None:
        """Has the profile planned, or says why there is none."""
        profile = line.profile
        if profile is None:
            if line.refused != UNUSED:  # there is nothing to plan
                self._teller.warn(without_plan(line.refused, self.before.refused))
            return
        beside = self.adherence.profiled(line.key, line.growth)
        if self._want_plan(line.key, profile, beside.ahead_bytes(self._number, line.foreseen_bytes)):
            self._teller.say(profiled(line.segments, len(self._known.profiles)))
            self._known.keep_profile(line.key, profile)

    def is_planning(self, line: Line) -> bool:
        """Whether its plan is under way."""
        return self._known.is_under_way(line.key)

    def segment_over(self, segment: Segment, watch: Watch | None) -> None:
        """Counts it, and compares a metered one with its budget."""
        if isinstance(watch, Metered):
            segment.report.peak_bytes = watch.peak_bytes
        self.total.add(segment.report)
        way = self._following
        if way is None:
            return
        if segment.outcome in (Outcome.USED, Outcome.LEFT_OVER) and self.adherence.has_ended(way, segment):
            self._study_anew(way)
        if isinstance(watch, Metered) and not segment.diverged:
            self._look(way, segment, watch)

    def _look(self, way: Way, segment: Segment, watch: Metered) -> None:
        """A segment that followed its plan may have taken more than its budget."""
        plan, peak_bytes = watch.plan, watch.peak_bytes
        if peak_bytes is None or not self._watch.is_over(peak_bytes, plan):
            return
        if watch.blocks_peak_bytes is not None and watch.blocks_peak_bytes <= plan.budget_bytes:
            self._served.gives_up(plan, peak_bytes)
            return
        if not watch.is_certain:
            self.adherence.check_next(way.key)
            return
        where = moment_in_words(watch.moment, plan)
        self._watch.look(peak_bytes, plan, where, lambda: held_beside(self.loop.engine, segment, plan))

    def optimizer_stepped(self) -> None:
        """Ranks are told here: they have all come to the same step."""
        if self.ranks is not None:
            self._known.poll()
            self.tell_ranks()

    @property
    def is_planner(self) -> bool:
        return self.ranks is None or self.ranks.is_first

    def tell_ranks(self, *, even_nothing: bool = False) -> bool:
        """All ranks follow what rank 0 has planned; whether that is all for now, as it says."""
        assert self.ranks is not None
        ready = self._known.ready
        told = Shared(ready, self.loop.lines.alike, self.is_all_planned) if ready or even_nothing else None
        shared = self.ranks.share(told if self.ranks.is_first else None)
        self._known.ready = []
        if shared is None:
            return False
        self.loop.lines.take(shared.alike)
        for key, plan in shared.plans:
            check_model(plan.model, self.loop.scene.model, "plan of rank 0")
            self._known.put_in_force(key, plan)
        return shared.is_all

    # -- plans ------------------------------------------------------------------------------------------------

    def _want_plan(self, key: Key, profile: Profile, ahead_bytes: int) -> bool:
        return self._known.want(key, profile, lambda budget, smallest: self._left_free(ahead_bytes, budget, smallest))

    @staticmethod
    def _left_free(ahead_bytes: int, budget_bytes: int, smallest_bytes: int) -> int:
        return left_free(ahead_bytes, budget_bytes - smallest_bytes)

    def _make_room(self, way: Way) -> None:
        """The host tier is large enough for the plan."""
        engine = self.loop.engine
        try:
            engine.make_room([way.plan.instructions])
        except OSError as error:
            self._teller.warn(host_is_full(engine.host.planned_bytes, error.strerror or ""))

    @property
    def _number(self) -> int:
        """Of the segment that begins."""
        return self.loop.engine.segment.number

    @property
    def _foreseen_bytes(self) -> int:
        """What the optimizers will come to hold."""
        return foreseen_bytes(self.loop.scene.optimizers, self.loop.scene.where.type)

    def _is_outgrown(self, way: Way, beside: Beside) -> bool:
        """Whether so much lives beside the step by now that the plan would break its budget; another is made then."""
        profile = self._known.profiles.get(way.key) if self._policy is OverBudget.REPLAN else None
        if profile is None:
            return False
        scene = self.loop.scene
        more_bytes = beside.outgrown(self._number, profile, way.plan, scene.where.type)
        if not more_bytes:
            return False
        self._known.withdraw(way.key)
        self.adherence.starts_anew(way.key)
        self._teller.say(OUTGROWN)
        ahead_bytes = beside.ahead_bytes(self._number, self._foreseen_bytes)
        self._want_plan(way.key, with_bytes_beside(profile, more_bytes), ahead_bytes)
        return True

    def _study_anew(self, way: Way) -> None:
        if self.ranks is not None:
            return
        self._known.leave(way.key)
        self.current = None if self.current is way else self.current
        self.loop.forget(way.key)
        self._teller.say(LEFT)
