"""Segments that are timed: whole, with nothing in the way but the hooks, whose time is taken off; or op by op."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from poochplan.formats.plan import Instructions
from poochplan.formats.profile import Phase
from poochplan.profiler.capture.timing import OpTimer
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.profiler.trials.paired import HookSeconds
from poochplan.runtime.compiled.points import told_of_points
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.handle import Handle
from poochplan.runtime.step_policies.course import Course
from poochplan.runtime.step_policies.follow import Follow
from poochplan.runtime.step_policies.step_policy import Actions, Diverged, StepPolicy
from poochplan.runtime.step_policies.swap_each import SwapEach
from poochplan.torch_private.tensor_internals import without_modes

from .watch import Pack, Scene, Unpack, Watch


def timed_policy(keeping: Instructions | None) -> StepPolicy:
    """Keeps every value where the step fits in-core; else swaps each at once, so that no copy runs beside an op."""
    return SwapEach(at_once=True) if keeping is None else Keeping(keeping)


class Keeping(Follow):
    """Follows instructions that keep all. ``differs``: where the segment was not the captured one."""

    def __init__(self, instructions: Instructions) -> None:
        super().__init__(Course.of(instructions), SwapEach(at_once=True))
        self.differs = ""

    def diverged(self, reason: Diverged) -> tuple[StepPolicy, Actions]:
        self.differs = reason.reason
        return super().diverged(reason)


class TimingWatch(Watch):
    """A base: what is spent in hooks is not the step's."""

    def __init__(self, scene: Scene, keeping: Instructions | None) -> None:
        super().__init__(scene, timed_policy(keeping))
        self._waits = keeping is None
        self.in_hooks = HookSeconds()

    def pack(self, tensor: torch.Tensor, pack: Pack) -> Handle:
        return self.aside(self.in_hooks.timed_pack(pack), tensor)

    def unpack(self, handle: Handle, unpack: Unpack) -> torch.Tensor:
        return self.aside(self.in_hooks.timed_unpack(unpack), handle)

    def aside(self, hook: Callable[[Any], Any], argument: Any) -> Any:
        if self._waits:
            self.scene.clock.synchronize()
        start_s = time.perf_counter()
        try:
            if not self._waits:
                return hook(argument)
            with without_modes():  # the ops of moving are not the step's
                result = hook(argument)
            self.scene.clock.synchronize()
            return result
        finally:
            self.hooks_s += time.perf_counter() - start_s

    def end(self, *, stepped: bool) -> None:
        super().end(stepped=stepped)
        if isinstance(self.policy, Keeping):
            self.why_not = self.why_not or self.policy.differs


class PhaseTiming(TimingWatch):
    """``seconds`` of each phase. What follows a backward counts only up to the optimizer's step, if there is one."""

    def __init__(self, scene: Scene, keeping: Instructions | None) -> None:
        super().__init__(scene, keeping)
        self._since_s = 0.0
        self._is_over = False

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        self._since_s = self._now_s()
        yield

    def enter(self, phase: Phase) -> None:
        self._account()
        super().enter(phase)

    def end(self, *, stepped: bool) -> None:
        if not self._is_over and stepped:
            self._account()
        self._is_over = True
        super().end(stepped=stepped)

    def _account(self) -> None:
        now_s = self._now_s()
        self.seconds[self.phase] += now_s - self._since_s
        self._since_s = now_s

    def _now_s(self) -> float:
        """Now, with all that was queued behind us, on a clock that stands still in hooks."""
        self.scene.clock.synchronize()
        return time.perf_counter() - self.hooks_s


class OpTiming(PhaseTiming):
    """``timer`` has the seconds of each op; those of the phases have the instruments in them."""

    def __init__(self, scene: Scene, keeping: Instructions | None) -> None:
        super().__init__(scene, keeping)
        self._tracker = LayerTracker()
        self.timer = OpTimer(scene.clock, self._tracker)
        self.nodes = self.timer.nodes

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        points = told_of_points(self.timer.point, self.scene.where.type)
        with self._tracker.on(self.scene.model), points, super().instruments(segment):
            self.timer.switch_on()
            try:
                yield
            finally:
                self.timer.switch_off()

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        self.timer.enter(phase)

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return self.timer.around_call(path, call)

    def observed(self, outputs: Any, run: Callable[[], Any]) -> Any:
        return run() if self.scene.there_before is not None else self.timer.observed(outputs, run)

    def aside(self, hook: Callable[[Any], Any], argument: Any) -> Any:
        with self.timer.paused():
            return super().aside(hook, argument)
