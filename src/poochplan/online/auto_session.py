"""AutoSession: profiles the loop that runs inside it, has it planned by another process, and follows the plans."""

from __future__ import annotations

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
from poochplan.profiler.live.lines import Key, Line
from poochplan.profiler.live.loop import Loop
from poochplan.profiler.live.watch import Watch
from poochplan.runtime.budget_watch import BudgetWatch, OverBudget, over_budget_text
from poochplan.runtime.devices.device import Device
from poochplan.runtime.drivers.driver import Driver
from poochplan.runtime.drivers.keep_all import KeepAll
from poochplan.runtime.drivers.swap_each import SwapEach
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.run_report import StepReport
from poochplan.runtime.watch.holders import Holder
from poochplan.runtime.watch.keeper import described as moment_in_words
from poochplan.runtime.watch.keeper import held_beside
from poochplan.runtime.watch.step_meter import StepMeter
from poochplan.runtime.watch.users_line import users_line
from poochplan.units import format_bytes, parse_budget

from .background import Background
from .following import Following, Metered, is_metered
from .plan_cache import PlanCache
from .telling import Teller, described
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
        self._watches: dict[Key, BudgetWatch] = {}
        self._beside_bytes: dict[Key, int] = {}
        """What was found to live beside segments of a kind, and their profile did not have."""
        self._teller = Teller(is_quiet=is_quiet)
        self._meter = StepMeter(where.type, "always")
        self._pending: dict[Key, Background] = {}
        self._followed: dict[Key, int] = {}
        self._missed: dict[Key, int] = {}
        self._studies: dict[Key, int] = {}
        self._looked_up: set[Key] = set()
        self._current: Way | None = None
        self._told_of: set[str] = set()
        self._stack = ExitStack()
        self.loop = Loop(
            models,
            optimizers,
            where,
            open_device,
            spill_dir=spill_dir,
            link=link,
            fits=lambda profile: profile.in_core_peak_bytes <= self._budget_of(profile),
            follower=self,
            observers=[self._meter.mode],
        )
        self._cache = PlanCache(cache, self.loop.scene.model, where, budget)

    def __enter__(self) -> AutoSession:
        with ExitStack() as stack:
            stack.callback(self._end)
            stack.enter_context(self.loop)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _end(self) -> None:
        for pending in self._pending.values():
            pending.close()
        self._pending.clear()
        self._teller.end()

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

    def wait_until_planned(self, timeout_s: float | None = None) -> bool:
        """Waits, between two steps, until no plan is under way; whether every profiled kind of segment has its plan.

        False too while segments are still being profiled: only steps bring that on.
        """
        self.loop.settle()
        for pending in tuple(self._pending.values()):
            pending.is_done(timeout_s)
        self._poll()
        return bool(self.ways) and not self._pending and not any(line.is_studied for line in self.loop.lines.values())

    # -- the loop's follower ----------------------------------------------------------------------------------

    def known(self, key: Key) -> Driver | Watch | None:
        """See :class:`~poochplan.profiler.live.loop.Follower`."""
        self._poll()
        self._look_up(key)
        found = self.ways.choose(key)
        if found is None:
            return None
        way, course = found
        self._make_room(way)
        self._current = way
        times = self._followed.get(way.key, 0)
        self._followed[way.key] = times + 1
        driver = Following(course, lambda segment: self._was_followed(way, segment))
        return Metered(self.loop.scene, driver, self._meter, self.loop.engine, way) if is_metered(times) else driver

    def driver(self, line: Line | None) -> Driver:
        """Until there is a plan, and where there will be none."""
        if line is not None and line.profile is not None and line.profile.mode == "run":
            return KeepAll()
        return SwapEach(at_once=True)

    def profiled(self, line: Line) -> None:
        """Has the profile planned, or says why there is none."""
        profile = line.profile
        if profile is None:
            self._warn(f"steps that save like this are swapped whole, for {line.refused}")
            return
        self.profiles[line.key] = profile
        self._teller.say(f"profiled in {line.segments} steps, planning")
        self._plan(line.key, profile)

    def _plan(self, key: Key, profile: Profile) -> None:
        """Has the profile planned by another process, where any plan fits."""
        budget_bytes = self._budget_of(profile)
        smallest_bytes = smallest_budget(profile)
        if smallest_bytes > budget_bytes:
            text = (
                f"no plan fits the budget of {format_bytes(budget_bytes)}: the smallest possible is {smallest_bytes} "
                f"bytes ({format_bytes(smallest_bytes)}), which {profile.in_core_peak_layer or 'the step'} needs; "
                "every saved value is swapped, and the budget is not kept"
            )
            if self._policy is OverBudget.ERROR:
                raise InfeasibleError(text, smallest_budget_bytes=smallest_bytes)
            self._warn(text)
            return
        self._pending[key] = Background(profile, budget_bytes, self._time_limit_s)

    def is_planning(self, line: Line) -> bool:
        """Whether its plan is under way."""
        return line.key in self._pending

    def segment_over(self, segment: Segment, watch: Watch | None) -> None:
        """Counts it, and compares a metered one with its budget."""
        if isinstance(watch, Metered):
            segment.report.peak_bytes = watch.peak_bytes
        self.total.add(segment.report)
        if isinstance(watch, Metered) and not segment.diverged:
            self._compare(segment, watch)

    # -- plans ------------------------------------------------------------------------------------------------

    def _budget_of(self, profile: Profile) -> int:
        return parse_budget(self._budget, profile.in_core_peak_bytes)

    def _poll(self) -> None:
        for key, pending in tuple(self._pending.items()):
            if not pending.is_done():
                continue
            del self._pending[key]
            try:
                plan = pending.plan()
                self._cache.keep(key, self.profiles[key], plan)
                self._follow(key, plan)
            except PoochError as error:
                self._warn(f"steps go on as they were profiled: {error}")
            finally:
                pending.close()

    def _compare(self, segment: Segment, watch: Metered) -> None:
        """A metered segment has followed its plan to the end."""
        key, plan, peak_bytes = watch.way.key, watch.way.plan, watch.peak_bytes or 0
        told = self._watches.setdefault(key, BudgetWatch(self._policy))
        if not told.is_over(peak_bytes, plan) or key in self._pending:
            return

        def held() -> list[Holder]:
            return held_beside(self.loop.engine, segment, plan)

        where = moment_in_words(watch.moment, plan)
        if self._policy is not OverBudget.REPLAN:
            told.look(peak_bytes, plan, where, held)
            return
        beside_bytes = self._beside_bytes.get(key, 0) + peak_bytes - plan.prediction.peak_bytes
        self._beside_bytes[key] = beside_bytes
        told.tell(f"{over_budget_text(peak_bytes, plan, where, held())}; it is planned anew with that")
        told.starts_anew()
        self._plan(key, with_bytes_beside(self.profiles[key], beside_bytes))

    def _look_up(self, key: Key) -> None:
        if key in self._looked_up or key in self.ways:
            return
        self._looked_up.add(key)
        found = self._cache.find(key)
        if found is not None:
            self.profiles[key] = found[0]
            self._follow(key, found[1])

    def _follow(self, key: Key, plan: Plan) -> None:
        self.ways[key] = Way.of(key, plan)
        self._teller.say(f"from the next step on {described(plan)}")

    def _make_room(self, way: Way) -> None:
        """The host tier is large enough for the plan."""
        host = self.loop.engine.host
        before_bytes = host.planned_bytes
        host.grow([way.plan.instructions])
        if host.planned_bytes > before_bytes:
            try:
                self.loop.engine.device.reserve_host(host.planned_bytes)
            except OSError as error:
                self._warn(f"the host tier cannot hold the planned {host.planned_bytes} bytes ({error.strerror})")

    def _was_followed(self, way: Way, segment: Segment) -> None:
        if not segment.diverged:
            self._missed[way.key] = 0
            return
        self._missed[way.key] = self._missed.get(way.key, 0) + 1
        studies = self._studies.get(way.key, 1)
        if self._missed[way.key] >= MISSES and studies < MOST_STUDIES:
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
