"""Segments after the captured one: timed as a whole without the hooks' time, or op by op; or replays are tried."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.profile import Phase
from poochplan.planner.arena.packing import packed
from poochplan.profiler.assembly.reconcile import PhaseSeconds, typical_phases
from poochplan.profiler.capture.timing import OpRuns, OpTimer
from poochplan.profiler.trials.late_writes import checksum
from poochplan.profiler.trials.verify_replays import HostStore, Verify
from poochplan.runtime.arena.step_arena import RepeatedStep
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.saved_value import SavedHandle
from poochplan.runtime.step_policies.follow import Follow
from poochplan.runtime.step_policies.step_policy import StepPolicy, SwapEach
from poochplan.tensors.host_memory import page_fault_s, page_faults
from poochplan.tensors.storages import has_storage
from poochplan.torch_private.tensor_internals import in_backward, without_modes

from .segment_observer import NewObserver, PackHook, SegmentObserver, StudyContext, UnpackHook

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
        self.instrument = self.timer = OpTimer(context.model, context.where)

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        with super().instruments(segment), self.timer.running():
            yield

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        self.timer.phase = phase

    def aside(self, hook: Hook, argument: Any) -> Any:
        with self.timer.nodes.set_aside():
            return super().aside(hook, argument)


@dataclass
class TimedSteps:
    """State: the steps timed so far."""

    context: StudyContext
    policy: Callable[[], StepPolicy | None]
    """Returns the policy of a step that is about to begin."""
    arena: RepeatedStep | None = None
    """The steps from here on use it."""
    in_hooks: list[HookSeconds] = field(default_factory=list)
    """The time in the hooks of steps that followed instructions under the engine."""
    faults: list[PhaseSeconds] = field(default_factory=list)
    """Page faults of every step."""

    def several(self, count: int) -> Generator[NewObserver, Any, list[PhaseSeconds]]:
        """The seconds of that many steps, timed whole."""
        seconds = []
        for _ in range(count):
            observer: PhaseTiming = yield lambda: PhaseTiming(self.context, self.policy(), self.arena)
            seconds.append(observer.seconds)
            self.faults.append({phase: float(count) for phase, count in observer.faults.items()})
            if isinstance(observer.policy, Follow) and not observer.why_not:
                self.in_hooks.append(observer.in_hooks)
        return seconds

    def by_op(self, count: int, runs: OpRuns) -> Generator[NewObserver, Any, None]:
        """Adds that many steps, timed op by op."""
        for _ in range(count):
            observer: OpTiming = yield lambda: OpTiming(self.context, self.policy(), self.arena)
            runs.add(observer.timer, observer.seconds)

    def recorded(self) -> Generator[NewObserver, Any, list[PhaseSeconds]]:
        """One ordinary step, by which an arena is laid out. One or two more follow that touch its pages. If these
        differ from the first there is no arena.
        """
        self.arena = RepeatedStep(packed)
        seconds = yield from self.several(1)
        for _ in range(2):
            yield from self.several(0 if self.arena.is_from_arena else 1)
        if not self.arena.is_from_arena:
            self.close()
        return seconds

    def close(self) -> None:
        """Steps are ordinary again. Idempotent."""
        if self.arena is not None:
            self.arena.rests()  # so that blocks that stay in it do not hold all of it
            self.arena.close()
        self.arena = None

    @property
    def have_followed(self) -> bool:
        """Whether all of them followed instructions under the engine."""
        return len(self.in_hooks) == len(self.faults)

    def without_faults(self, steps: list[PhaseSeconds]) -> list[PhaseSeconds]:
        """The steps without the seconds that fresh pages take: an arena keeps its pages. If they seem to be more than
        half of a phase, the machine was busy when a page fault was timed.
        """
        fresh_s = {phase: count * page_fault_s() for phase, count in typical_phases(self.faults).items()}
        return [{phase: max(one / 2, one - fresh_s[phase]) for phase, one in step.items()} for step in steps]


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
        self.verify.late_writes.forget()
        if self._store is not None:
            self._store.close()


def _sum(tensor: torch.Tensor, kind: str) -> int:
    """Checksum of the tensor's storage; 0 without one, for a part of one, or on another device."""
    if not has_storage(tensor, kind) or tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
        return 0
    return checksum(tensor.untyped_storage())
