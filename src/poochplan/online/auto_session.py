"""AutoSession: profiles the loop that runs inside it, has it planned by another process, and follows the plans."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from poochplan.errors import InfeasibleError, PoochError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Link, Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.whatif import with_bytes_beside
from poochplan.profiler.live.lines import UNUSED, Key, Line
from poochplan.profiler.live.loop import Loop
from poochplan.profiler.live.watch import Watch
from poochplan.runtime.budget_watch import BudgetWatch, OverBudget
from poochplan.runtime.devices.device import Device
from poochplan.runtime.drivers.driver import Driver
from poochplan.runtime.drivers.follow import Follow
from poochplan.runtime.drivers.keep_all import KeepAll
from poochplan.runtime.drivers.swap_each import SwapEach
from poochplan.runtime.engine.cursor import Outcome, Segment
from poochplan.runtime.model_check import check_model
from poochplan.runtime.run_report import StepReport
from poochplan.runtime.watch.growth import Growth, foreseen_bytes
from poochplan.runtime.watch.keeper import described as moment_in_words
from poochplan.runtime.watch.keeper import held_beside
from poochplan.runtime.watch.step_meter import StepMeter
from poochplan.runtime.watch.users_line import users_line
from poochplan.units import parse_budget

from .background import Background, Plannings
from .following import Beside, Metered, is_metered, left_free
from .plan_cache import PlanCache
from .ranks import Ranks, Shared
from .telling import Teller, described, infeasible
from .ways import Way, Ways

MOST_STUDIES = 3
"""Of one kind of segment, where its plans are not what it does."""
MISSES = 2
"""Segments in a row that leave their plan, after which they are studied anew."""


class AutoSession:
    """A context manager. State: the plans in force (``ways``), the profiles, and the plans that are under way.

    See :func:`poochplan.auto` for the parameters.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        where: torch.device,
        budget: str | int | float,
        open_device: Callable[[], Device],
        *,
        cache: Path,
        spill_dir: str | Path | None,
        link: Callable[[], Link],
        time_limit_s: float,
        on_over_budget: str,
        is_quiet: bool,
    ) -> None:
        self.ways = Ways()
        self.profiles: dict[Key, Profile] = {}
        self.total = StepReport()
        self._budget = budget
        self._time_limit_s = time_limit_s
        self._policy = OverBudget(on_over_budget)
        self._watch = BudgetWatch(OverBudget.ERROR if self._policy is OverBudget.ERROR else OverBudget.WARN)
        self._teller = Teller(is_quiet=is_quiet)
        self._meter = StepMeter(where.type, "first-steps")
        self._pending = Plannings()
        self._hopeless: set[Key] = set()
        """No plan fits these."""
        self._following: Way | None = None
        """Of the open segment."""
        self._followed: dict[Key, int] = {}
        self._beside: dict[Key, Beside] = {}
        self._missed: dict[Key, int] = {}
        self._studies: dict[Key, int] = {}
        self._looked_up: set[Key] = set()
        self._current: Way | None = None
        self._told_of: set[str] = set()
        self._smallest_bytes = 0
        """The largest of the smallest possible budgets that were told."""
        self._ranks: Ranks | None = None
        self._ready: list[tuple[Key, Plan]] = []
        """Where there are ranks: what they have not been told."""
        self._stack = ExitStack()
        self.loop = Loop(
            models,
            optimizers,
            where,
            open_device,
            spill_dir=spill_dir,
            link=link,
            fits=lambda profile: profile.in_core_peak_bytes <= self._budget_of(profile),
            room=self._budget_of,
            follower=self,
            observers=[self._meter.mode],
        )
        self._cache = PlanCache(cache, self.loop.scene.model, where, budget)

    def __enter__(self) -> AutoSession:
        with ExitStack() as stack:
            stack.callback(self._end)
            stack.callback(self._meter.close)
            stack.enter_context(self.loop)
            self._ranks = Ranks.of(self.loop.attachment.models.values())
            self._teller.is_quiet |= not self._is_planner
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def lasts_while(self, is_wanted: Callable[[], bool]) -> None:
        """The session ends, at the latest, where something is trained and ``is_wanted()`` says no.

        For those who are not told how a call ends: a callback of a trainer whose ``train`` may raise.
        """
        self.loop.attachment.is_wanted = is_wanted
        self.loop.attachment.abandoned = self.close

    def close(self) -> None:
        """As the end of the ``with`` block. Idempotent."""
        self._stack.close()

    def _end(self) -> None:
        self._keep_for_the_next_run()
        if self._pending:
            self._teller.say("the loop has ended while a plan was being made; the next run goes on from its profile")
        elif not self.profiles and any(line.is_studied for line in self.loop.lines.values()):
            self._teller.say(
                "the loop has ended before it was profiled, which takes a dozen steps: nothing was planned"
            )
        self._pending.close()
        self._teller.end()

    def _keep_for_the_next_run(self) -> None:
        """Plans that nobody has followed yet, and which kinds are alike: it has nothing to compare them with."""
        for key, pending in self._pending.take_done():
            with contextlib.suppress(PoochError):
                self._cache.keep(key, self.profiles[key], pending.plan())
            pending.close()
        for key, like in self.loop.lines.alike:
            if like in self.ways and like in self.profiles:
                self._cache.keep(key, self.profiles[like], self.ways[like].plan)

    # -- what a user asks -------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan that was followed last, else the first in force; None before there is one."""
        way = self._current or next(iter(self.ways.values()), None)
        return None if way is None else way.plan

    @property
    def profile(self) -> Profile | None:
        """Of the plan's segments; of the first profiled ones before there is a plan."""
        if self._current is not None:
            return self.profiles.get(self._current.key)
        return next(iter(self.profiles.values()), None)

    @property
    def followed(self) -> int:
        """So many segments have begun under a plan."""
        return sum(self._followed.values())

    def explain_peak(self) -> str:
        """Where the step takes most memory, and who holds it, in lines of text; empty before anything is profiled.

        Of the planned step, or of the in-core one before there is a plan. Of the session's metered steps the largest
        peak stands beside the prediction.
        """
        from poochplan.report.peak import explain_peak  # here, for pandas takes long to load

        way = self._current or next(iter(self.ways.values()), None)
        profile = self.profile if way is None else self.profiles.get(way.key)
        if profile is None:
            return ""
        return str(explain_peak(profile, way and way.plan, measured_peak_bytes=self.total.peak_bytes))

    def wait_until_planned(self, timeout_s: float | None = None) -> bool:
        """Waits, between two steps, until no plan is under way; whether every profiled kind of segment has its plan.

        False too while segments are still being profiled: only steps bring that on.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.loop.settle()
        while self._pending and (end_s is None or time.monotonic() < end_s):
            self._pending.wait(None if end_s is None else max(0.0, end_s - time.monotonic()))
            self._poll()
        return self._tell_ranks(even_nothing=True) if self._ranks is not None else self._is_all_planned

    @property
    def _is_all_planned(self) -> bool:
        studied = any(line.is_studied for line in self.loop.lines.values())
        return bool(self.ways or self._ready) and not self._pending and not studied

    # -- the loop's follower ----------------------------------------------------------------------------------

    def known(self, key: Key) -> Driver | Watch | None:
        """See :class:`~poochplan.profiler.live.loop.Follower`."""
        self._poll()
        self._look_up(key)
        self._following = None
        if key in self._pending or key in self._hopeless:
            return self._without_plan(self.profiles[key])
        found = self.ways.choose(key)
        if found is None:
            return None if self._is_planner else SwapEach(at_once=True)
        way, course = found
        times = self._followed.get(way.key, 0)
        beside = self._beside.setdefault(way.key, Beside(Growth()))
        if (is_metered(times) or beside.is_due(self._number)) and self._is_outgrown(way, beside):
            return SwapEach(at_once=True)
        self._make_room(way)
        self._current = self._following = way
        self._followed[way.key] = times + 1
        driver = Follow(course, SwapEach())
        is_due = is_metered(times)
        if not is_due and self.loop.engine.device.step_peak_bytes() is None:  # no allocator tells: ops would have to
            return driver
        self._meter.settled(not is_due)
        return Metered(self.loop.scene, driver, self._meter, self.loop.engine, way.plan)

    def driver(self, line: Line | None) -> Driver:
        """Until there is a plan, and where there will be none."""
        return self._without_plan(None if line is None else line.profile)

    def _without_plan(self, profile: Profile | None) -> Driver:
        """Keeps all where that is known to fit the budget."""
        fits = profile is not None and profile.in_core_peak_bytes <= self._budget_of(profile)
        return KeepAll() if fits else SwapEach(at_once=True)

    def profiled(self, line: Line) -> None:
        """Has the profile planned, or says why there is none."""
        profile = line.profile
        if profile is None:
            if line.refused != UNUSED:  # there is nothing to plan
                self._warn(f"steps that save like this are swapped whole, for {line.refused}")
            return
        beside = self._beside[line.key] = Beside(line.growth)
        if self._want_plan(line.key, profile, beside.ahead_bytes(self._number, line.foreseen_bytes)):
            which = "" if len(self.profiles) == 1 else f" of kind {len(self.profiles)}"
            self._teller.say(f"profiled in {line.segments} steps{which}; planning in another process")
            self._cache.keep(line.key, profile)

    def _want_plan(self, key: Key, profile: Profile, ahead_bytes: int) -> bool:
        """Whether one is under way now; it is said why not."""
        self.profiles[key] = profile
        budget_bytes = self._budget_of(profile)
        smallest_bytes = smallest_budget(profile)
        if smallest_bytes > budget_bytes:
            self._hopeless.add(key)
            if smallest_bytes > self._smallest_bytes:
                self._smallest_bytes = smallest_bytes
                text = infeasible(profile, budget_bytes, smallest_bytes)
                if self._policy is OverBudget.ERROR:
                    raise InfeasibleError(text, smallest_budget_bytes=smallest_bytes)
                self._warn(text)
            return False
        if ahead_bytes:
            profile = with_bytes_beside(profile, left_free(ahead_bytes, budget_bytes - smallest_bytes))
            self.profiles[key] = profile
        try:
            self._pending[key] = Background(profile, budget_bytes, self._time_limit_s)
        except OSError as error:
            self._warn(f"steps go on as they were profiled: planning could not begin ({error.strerror})")
        return key in self._pending

    def is_planning(self, line: Line) -> bool:
        """Whether its plan is under way."""
        return line.key in self._pending

    def segment_over(self, segment: Segment, watch: Watch | None) -> None:
        """Counts it, and compares a metered one with its budget."""
        if isinstance(watch, Metered):
            segment.report.peak_bytes = watch.peak_bytes
        self.total.add(segment.report)
        if self._following is not None and segment.outcome in (Outcome.USED, Outcome.LEFT_OVER):
            self._was_followed(self._following, segment)
        if isinstance(watch, Metered) and watch.peak_bytes is not None and not segment.diverged:
            plan, where = watch.plan, moment_in_words(watch.moment, watch.plan)
            self._watch.look(watch.peak_bytes, plan, where, lambda: held_beside(self.loop.engine, segment, plan))

    def optimizer_stepped(self) -> None:
        """Ranks are told here: they have all come to the same step."""
        if self._ranks is not None:
            self._poll()
            self._tell_ranks()

    @property
    def _is_planner(self) -> bool:
        return self._ranks is None or self._ranks.is_first

    def _tell_ranks(self, *, even_nothing: bool = False) -> bool:
        """All ranks follow what rank 0 has planned; whether that is all for now, as it says."""
        assert self._ranks is not None
        told = Shared(self._ready, self.loop.lines.alike, self._is_all_planned) if self._ready or even_nothing else None
        shared = self._ranks.share(told if self._ranks.is_first else None)
        self._ready = []
        if shared is None:
            return False
        self.loop.lines.take(shared.alike)
        for key, plan in shared.plans:
            check_model(plan.model, self.loop.scene.model, "plan of rank 0")
            self._put_in_force(key, plan)
        return shared.is_all

    # -- plans ------------------------------------------------------------------------------------------------

    def _budget_of(self, profile: Profile) -> int:
        return parse_budget(self._budget, profile.in_core_peak_bytes)

    def _poll(self) -> None:
        for key, pending in self._pending.take_done():
            try:
                plan = pending.plan()
                self._cache.keep(key, self.profiles[key], plan)
                self._follow(key, plan)
            except PoochError as error:
                self._warn(f"steps go on as they were profiled: {error}")
            finally:
                pending.close()

    def _look_up(self, key: Key) -> None:
        if key in self._looked_up or key in self.ways or not self._is_planner:
            return
        self._looked_up.add(key)
        profile, plan = self._cache.find(key) or (None, None)
        if profile is not None and plan is not None:
            self.profiles[key] = profile
            self._follow(key, plan)
        elif profile is not None and self._want_plan(key, profile, self._foreseen_bytes):
            self._teller.say("profiled in an earlier run; planning in another process")

    def _follow(self, key: Key, plan: Plan) -> None:
        if self._ranks is not None:
            self._ready.append((key, plan))
        else:
            self._put_in_force(key, plan)

    def _put_in_force(self, key: Key, plan: Plan) -> None:
        self.ways[key] = Way.of(key, plan)
        self._teller.say(f"from the next step on {described(plan)}")

    def _make_room(self, way: Way) -> None:
        """The host tier is large enough for the plan."""
        engine = self.loop.engine
        before_bytes = engine.host.planned_bytes
        engine.host.grow([way.plan.instructions])
        # Reserving writes the file from its end on, where values of earlier segments may lie.
        if engine.host.planned_bytes > before_bytes and not engine.cursor.holds_values:
            try:
                engine.device.reserve_host(engine.host.planned_bytes)
            except OSError as error:
                self._warn(f"the host tier cannot hold {engine.host.planned_bytes} bytes ({error.strerror})")

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
        profile = self.profiles.get(way.key) if self._policy is OverBudget.REPLAN else None
        if profile is None:
            return False
        scene = self.loop.scene
        more_bytes = beside.outgrown(self._number, profile, way.plan, scene.where.type)
        if not more_bytes:
            return False
        del self.ways[way.key]
        self._followed[way.key] = 0
        self._teller.say("more lives beside the step than when it was profiled: planning again")
        ahead_bytes = beside.ahead_bytes(self._number, self._foreseen_bytes)
        self._want_plan(way.key, with_bytes_beside(profile, more_bytes), ahead_bytes)
        return True

    def _was_followed(self, way: Way, segment: Segment) -> None:
        if not segment.diverged:
            self._missed[way.key] = 0
            return
        self._missed[way.key] = self._missed.get(way.key, 0) + 1
        studies = self._studies.get(way.key, 1)
        if self._missed[way.key] >= MISSES and studies < MOST_STUDIES and self._ranks is None:
            self._studies[way.key] = studies + 1
            self._missed[way.key] = 0
            self._cache.drop(way.key)
            del self.ways[way.key]
            self._current = None if self._current is way else self._current
            self.loop.forget(way.key)
            self._teller.say("steps are not the planned ones any more: profiling again")

    # -- telling ----------------------------------------------------------------------------------------------

    def _warn(self, text: str) -> None:
        if text not in self._told_of:
            self._told_of.add(text)
            warnings.warn(f"poochplan: {text}", RuntimeWarning, stacklevel=users_line())
