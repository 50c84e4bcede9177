"""Segments after the captured one: timed as a whole without the hooks' time, or op by op; or replays are tried."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterator
from typing import Any, Literal

import torch

from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.profile import Phase
from poochplan.profiler.capture.timing import OpTimer
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.profiler.trials.verify_replays import PIECE_BYTES, HostStore, Verify
from poochplan.runtime.arena.step_arena import RepeatedStep
from poochplan.runtime.compiled.points import told_of_points
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.saved_value import SavedHandle
from poochplan.runtime.step_policies.follow import Follow
from poochplan.runtime.step_policies.step_policy import StepPolicy, SwapEach
from poochplan.tensors.host_memory import page_faults
from poochplan.tensors.storages import bytes_of, has_storage
from poochplan.torch_private.tensor_internals import in_backward, without_modes

from .segment_observer import PackHook, SegmentObserver, StudyContext, UnpackHook

Hook = Callable[[Any], Any]


class HookSeconds:
    """CPU seconds inside hooks, each counted on the thread on which autograd calls the hook."""

    def __init__(self) -> None:
        self.pack_s = self.unpack_s = 0.0

    @property
    def total_s(self) -> float:
        return self.pack_s + self.unpack_s

    def timed(self, name: Literal["pack_s", "unpack_s"], hook: Hook) -> Hook:
        """The hook, its seconds added to ``pack_s`` or ``unpack_s``."""

        def timed(argument: Any) -> Any:
            start_s = time.thread_time()
            try:
                return hook(argument)
            finally:
                setattr(self, name, getattr(self, name) + time.thread_time() - start_s)

        return timed


class PhaseTiming(SegmentObserver):
    """``seconds`` of each phase, without those in hooks, and the page ``faults`` of each on the step's thread. Code
    after a backward counts up to the optimizer's step, if there is one.

    ``arena``: the arena of a step function; None for the ordinary allocator.
    """

    def __init__(self, context: StudyContext, policy: StepPolicy | None, arena: RepeatedStep | None = None) -> None:
        super().__init__(context, policy)
        self._waits = isinstance(policy, SwapEach)
        self.in_hooks = HookSeconds()
        self.faults: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self._arena = arena
        self._since_s = 0.0
        self._since_faults = 0
        self._is_over = False

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        with self._arena.run() if self._arena is not None else contextlib.nullcontext():
            self._since_s, self._since_faults = self._now_s(), page_faults()
            yield

    def pack(self, tensor: torch.Tensor, pack: PackHook) -> SavedHandle:
        return self.aside(self.in_hooks.timed("pack_s", pack), tensor)

    def unpack(self, handle: SavedHandle, unpack: UnpackHook) -> torch.Tensor:
        return self.aside(self.in_hooks.timed("unpack_s", unpack), handle)

    def aside(self, hook: Hook, argument: Any) -> Any:
        if self._waits:
            self.context.clock.synchronize()
        start_s, faults = time.perf_counter(), page_faults()
        try:
            if not self._waits:
                return hook(argument)
            with without_modes():  # the ops of moving are not part of the step
                result = hook(argument)
            self.context.clock.synchronize()
            return result
        finally:
            self._since_faults += page_faults() - faults
            self.hooks_s += time.perf_counter() - start_s

    def enter(self, phase: Phase) -> None:
        self._account()
        super().enter(phase)

    def end(self, *, stepped: bool) -> None:
        if not self._is_over and stepped:
            self._account()
        self._is_over = True
        super().end(stepped=stepped)
        if isinstance(self.policy, Follow):
            self.why_not = self.why_not or self.policy.divergence

    def _account(self) -> None:
        now_s, faults = self._now_s(), page_faults()
        self.seconds[self.phase] += now_s - self._since_s
        self.faults[self.phase] += max(0, faults - self._since_faults)  # less is another thread's count
        self._since_s, self._since_faults = now_s, faults

    def _now_s(self) -> float:
        """The present time, once all queued work is done, on a clock that stops in hooks."""
        self.context.clock.synchronize()
        return time.perf_counter() - self.hooks_s


class OpTiming(PhaseTiming):
    """``timer`` has the seconds of each op. The seconds of the phases include the instruments."""

    def __init__(self, context: StudyContext, policy: StepPolicy | None, arena: RepeatedStep | None = None) -> None:
        super().__init__(context, policy, arena)
        self._tracker = LayerTracker()
        self.instrument = self.timer = OpTimer(context.clock, self._tracker)

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        points = told_of_points(self.timer.point, self.context.where.type)
        with self._tracker.on(self.context.model), points, super().instruments(segment):
            self.timer.switch_on()
            try:
                yield
            finally:
                self.timer.switch_off()

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        self.timer.phase = phase

    def aside(self, hook: Hook, argument: Any) -> Any:
        with self.timer.paused():
            return super().aside(hook, argument)


class Summing(SegmentObserver):
    """``sums`` has one sum for each tensor that forward saves. The sum is 0 for values at the save points that are
    ``unwritten``; there are no sums if these are None.
    """

    def __init__(self, context: StudyContext, policy: StepPolicy, unwritten: Container[int] | None) -> None:
        super().__init__(context, policy)
        self.sums: list[int] = []
        self._unwritten = unwritten

    def pack(self, tensor: torch.Tensor, pack: PackHook) -> SavedHandle:
        if self._unwritten is None or in_backward():
            return super().pack(tensor, pack)
        sum_, handle = _sum(tensor, self.context.where.type), super().pack(tensor, pack)
        self.sums.append(0 if handle.value is not None and handle.value.index in self._unwritten else sum_)
        return handle


class Verifying(Summing):
    """``verify`` has the results; its copies are on the host if values are swapped."""

    def __init__(
        self, context: StudyContext, instructions: Instructions, unwritten: Container[int] | None = None
    ) -> None:
        swaps = any(value.decision is Decision.SWAP for value in instructions.values)
        self._store = HostStore(context.where, context.spill_dir) if swaps else None
        self.verify = Verify(instructions, context.model, self._store)
        super().__init__(context, self.verify, unwritten)
        self.rebuild = self.verify.rebuild
        self.swaps_once = True

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        if not self.context.is_repeated:
            self.look_around()
        yield

    def end(self, *, stepped: bool) -> None:
        super().end(stepped=stepped)
        if self._store is not None:
            self._store.close()


def _sum(tensor: torch.Tensor, kind: str) -> int:
    """Sum of the tensor's storage as four-byte numbers; 0 without one, for a part of one, or on another device."""
    if not has_storage(tensor, kind) or tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
        return 0
    with without_modes(), torch.no_grad():
        pieces = bytes_of(tensor.untyped_storage()).split(PIECE_BYTES)  # a sum has numbers of eight bytes
        words = [one[: len(one) // 4 * 4].view(torch.int32) for one in pieces]
        return sum(int(one.sum(dtype=torch.int64)) for one in (*words, pieces[-1][len(words[-1]) * 4 :]))
