"""AutoSession: profiles the loop that runs inside it, has it planned by another process, and follows the plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from poochplan.formats.plan import Plan
from poochplan.formats.profile import Link, Profile
from poochplan.planner.simulator.evaluator import begin_build
from poochplan.profiler.live.lines import Key
from poochplan.profiler.live.loop import Loop
from poochplan.runtime.budget_watch import OverBudget
from poochplan.runtime.devices.device import Device
from poochplan.runtime.run_report import ArenaReport, StepReport
from poochplan.runtime.serving import ArenaMode
from poochplan.runtime.watch.step_meter import StepMeter

from .before_plan import BeforePlan, Unplanned
from .plans.known_plans import KnownPlans
from .plans.plan_cache import PlanCache
from .plans.ways import Ways
from .plans_follower import PlansFollower
from .ranks import Ranks
from .served_segments import ServedSegments
from .telling import ENDED_UNPLANNED, ENDED_UNPROFILED, IN_CORE, Teller


class AutoSession:
    """A context manager. The plans are with :class:`~.plans.known_plans.KnownPlans`; what becomes of segments says
    :class:`~.plans_follower.PlansFollower`.

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
        before_plan: Unplanned,
        on_refusal: Unplanned,
        arena: ArenaMode,
        is_quiet: bool,
    ) -> None:
        policy = OverBudget(on_over_budget)
        self._teller = Teller(is_quiet=is_quiet)
        begin_build()
        self._meter = StepMeter(where.type, "first-steps")
        self._served = ServedSegments(arena, where, self._teller, self._meter)
        self._known = KnownPlans(
            budget,
            time_limit_s,
            arena,
            policy,
            self._teller,
            self._served.dropped,
            on_refusal,
            None if spill_dir is None else str(spill_dir),
        )
        self._follower = PlansFollower(self._known, self._served, self._meter, policy, self._teller)
        self._stack = ExitStack()
        self.loop = Loop(
            models,
            optimizers,
            where,
            open_device,
            spill_dir=spill_dir,
            link=link,
            fits=lambda profile: profile.in_core_peak_bytes <= self._room_of(profile),
            room=self._room_of,
            follower=self._follower,
            events=self._served.events,
            unplanned=lambda: self._before.driver(),
            measures_later=where.type == "cpu",
        )
        self._follower.loop = self.loop
        scene, is_short = self.loop.scene, self.loop.attachment.memory_is_short
        self._before = BeforePlan(before_plan, on_refusal, scene.model, where, scene.optimizers, is_short)
        self._follower.before = self._before
        self._known.cache = PlanCache(cache, self.loop.scene.model, where, budget, arena)

    def __enter__(self) -> AutoSession:
        with ExitStack() as stack:
            stack.callback(self._end)
            stack.callback(self._meter.close)
            stack.callback(self._served.close)
            stack.enter_context(self.loop)
            self._follower.ranks = Ranks.of(self.loop.attachment.models.values())
            self._teller.is_quiet |= not self._follower.is_planner
            self._known.is_shared = self._follower.ranks is not None
            if self._before.before is Unplanned.IN_CORE:
                self._teller.say(IN_CORE)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _room_of(self, profile: Profile) -> int:
        return self._before.room_of(self._known.budget_of(profile))

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
        known = self._known
        known.keep_for_the_next_run(self.loop.lines.alike)
        if known.is_any_without:
            self._teller.say(ENDED_UNPLANNED)
        elif not known.profiles and any(line.is_studied for line in self.loop.lines.values()):
            self._teller.say(ENDED_UNPROFILED)
        known.close()
        self._teller.end()

    # -- what a user asks -------------------------------------------------------------------------------------

    @property
    def total(self) -> StepReport:
        """All segments together."""
        return self._follower.total

    @property
    def ways(self) -> Ways:
        """The plans in force, by kind of segment."""
        return self._known.ways

    @property
    def profiles(self) -> dict[Key, Profile]:
        """By kind of segment."""
        return self._known.profiles

    @property
    def arena(self) -> ArenaReport | None:
        """What the arena did in the last segment that could be served; None before there was one. ``total`` has the
        bytes of all segments.
        """
        return self._served.report()

    @property
    def plan(self) -> Plan | None:
        """The plan that was followed last, else the first in force; None before there is one."""
        way = self._follower.current or next(iter(self.ways.values()), None)
        return None if way is None else way.plan

    @property
    def profile(self) -> Profile | None:
        """Of the plan's segments; of the first profiled ones before there is a plan."""
        if self._follower.current is not None:
            return self.profiles.get(self._follower.current.key)
        return next(iter(self.profiles.values()), None)

    @property
    def followed(self) -> int:
        """So many segments have begun under a plan."""
        return self._follower.adherence.followed

    def explain_peak(self) -> str:
        """Where the step takes most memory, and who holds it, in lines of text; empty before anything is profiled.

        Of the planned step, or of the in-core one before there is a plan. Of the session's metered steps the largest
        peak stands beside the prediction.
        """
        from poochplan.report.peak import explain_peak  # here, for pandas takes long to load

        way = self._follower.current or next(iter(self.ways.values()), None)
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
        self._served.wait_until_ready(timeout_s)
        self._known.wait(end_s)
        return (
            self._follower.tell_ranks(even_nothing=True)
            if self._follower.ranks is not None
            else self._follower.is_all_planned
        )
