"""ServedSegments: the segments of a running loop that follow a plan, served from an arena; the allocator for that."""

from __future__ import annotations

import contextlib
import threading

import torch

from poochplan.errors import AllocatorError, NativeError, UsageError
from poochplan.formats.plan import Plan
from poochplan.planner.arena.packing import packed
from poochplan.runtime.allocator.building import build, is_built
from poochplan.runtime.allocator.library import is_loaded, library
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.step_events import StepEvents
from poochplan.runtime.run_report import ArenaReport
from poochplan.runtime.serving import ArenaMode, Serving, why_no_arena, why_not_served
from poochplan.runtime.watch.step_meter import StepMeter

from .telling import BUILDING, Teller, arena_given_up, no_arena


class AllocatorBuild:
    """State: the compiled allocator's build, in the background where it is not there yet. The first segments are
    profiled behind it, since a profile that was begun without it would never have what ops take.

    Raises ``UsageError`` where the mode is ``"on"`` and there can be no arena.
    """

    def __init__(self, mode: ArenaMode, where: torch.device, teller: Teller) -> None:
        self._thread: threading.Thread | None = None
        reason = why_no_arena(where.type)
        self._is_loaded = bool(reason)
        if not reason and mode == "on":  # there is to be one, or an error: it is waited for
            try:
                library()
            except AllocatorError as error:
                reason = str(error)
        if reason and mode == "on":
            raise UsageError(f'arena: expected "on" to be possible, found {reason}')
        if not (reason or is_loaded() or is_built()):
            teller.say(BUILDING)
            self._thread = threading.Thread(target=self._build, name="allocator's build")
            with contextlib.suppress(RuntimeError):  # where address space is limited it is built by who needs it
                self._thread.start()

    @staticmethod
    def _build() -> None:
        with contextlib.suppress(NativeError):  # who loads it is told why
            build()

    def wait(self, wait_s: float | None) -> None:
        """Until it is built, or for so long."""
        if self._thread is not None:
            self._thread.join(wait_s)

    @property
    def is_ready(self) -> bool:
        """Whether it is in force, or there will be none."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if not self._is_loaded:
            self._is_loaded = True
            with contextlib.suppress(AllocatorError):
                library()
        return True


class ServedSegments:
    """State: the plan that the open segment follows, until it begins or leaves it. Segments that follow none, as those
    that are studied, are never served.

    Parameters
    ----------
    mode: as for :func:`poochplan.auto`.
    meter: of the steps, which an arena counts in whole.
    """

    def __init__(self, mode: ArenaMode, where: torch.device, teller: Teller, meter: StepMeter) -> None:
        self._build = AllocatorBuild(mode, where, teller)
        self._mode, self._device, self._teller = mode, where.type, teller
        self._meter = meter
        is_possible = mode != "off" and not why_no_arena(self._device)
        self._serving = Serving(packed) if is_possible else None
        self._plan: Plan | None = None
        self._segment: Segment | None = None
        self._served: Plan | None = None
        """The one whose segments were served last."""
        self._reasons: dict[int, tuple[Plan, str]] = {}
        """By the identity of a plan that is in force, why its segments are not served; empty where they are."""

    @property
    def is_ready(self) -> bool:
        """Whether the allocator is in force, or there will be none."""
        return self._build.is_ready

    def wait_until_ready(self, wait_s: float | None) -> None:
        """Until then, or for so long."""
        self._build.wait(wait_s)

    @property
    def events(self) -> StepEvents:
        """For the loop."""
        if self._serving is None:
            return StepEvents(point=self._at, backward=self._meter.backward)
        return StepEvents(
            point=self._at,
            backward=self._meter.backward,
            over=lambda _: self._step_is_over(),
            departed=self._departed,
            resting=self._serving.rests,
            optimizing=self._serving.optimizer_steps,
        )

    def begins(self, segment: Segment, plan: Plan | None) -> None:
        """A segment has begun, which follows that plan or none."""
        if self._serving is None:
            return
        self._segment = segment
        self._plan = plan if plan is not None and not self._why_not(plan) else None
        if self._plan is None and self._served is not None:
            self._serving.stands_aside()
            self._meter.served_from(0)

    def _why_not(self, plan: Plan) -> str:
        known = self._reasons.get(id(plan))
        if known is None:
            known = self._reasons[id(plan)] = plan, why_not_served(self._mode, self._device, [plan])
            if known[1] and self._mode == "on":
                self._teller.warn(no_arena(known[1]))
        return known[1]

    def gives_up(self, plan: Plan, peak_bytes: int) -> None:
        """Segments of that plan have taken more than its budget, and with their blocks elsewhere they would not."""
        self._reasons[id(plan)] = plan, "what lies outside is more than was planned"
        if self._serving is not None:
            self._serving.forget(plan)
        self._teller.say(arena_given_up(peak_bytes, plan.budget_bytes))

    def dropped(self, plan: Plan) -> None:
        """No segment follows that plan any more."""
        self._reasons.pop(id(plan), None)
        if self._serving is not None:
            self._serving.forget(plan)

    def close(self) -> None:
        """Nothing is served any more; what lies in the arena stays as it is."""
        self._plan = None
        if self._serving is not None:
            self._serving.close()

    def report(self) -> ArenaReport | None:
        """What became of the blocks of the last segment that could be served; None before there was one."""
        if self._serving is None or self._served is None:
            return None
        return self._serving.report(self._served)

    # -- told by the loop -------------------------------------------------------------------------------------

    def _at(self, passed: int) -> None:
        self._meter.point()
        if self._serving is None:
            return
        if passed > 1:
            self._serving.at(passed)
        elif self._plan is not None and self._segment is not None:
            self._served = self._plan
            self._serving.begin(self._plan, self._segment)
            self._meter.served_from(self._serving.arena_bytes)

    def _step_is_over(self) -> None:
        assert self._serving is not None
        self._serving.step_is_over()

    def _departed(self) -> None:
        assert self._serving is not None
        self._plan = None
        self._serving.departed()
