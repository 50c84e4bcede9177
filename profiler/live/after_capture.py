"""Segments that are timed: whole, with nothing in the way but the hooks, whose time is taken off; or op by op."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterator
from itertools import zip_longest
from typing import Any

import msgspec
import torch

from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.profile import Phase, Profile
from poochplan.formats.queries import saved_values
from poochplan.profiler.assembly.values import UNWRITTEN
from poochplan.profiler.capture.timing import OpTimer
from poochplan.profiler.step.layer_tracker import LayerTracker
from poochplan.profiler.step.preserve import preserved
from poochplan.profiler.trials.compare import RECORDED, instructions_for, verification, verifying, without_replays
from poochplan.profiler.trials.handle_cost import HookSeconds
from poochplan.profiler.trials.host_store import HostStore, bytes_of
from poochplan.profiler.trials.verify_replays import PIECE_BYTES, Verify
from poochplan.runtime.compiled.points import told_of_points
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.saved_value import Handle
from poochplan.runtime.step_policies.follow import Course, Follow
from poochplan.runtime.step_policies.step_policy import Actions, Diverged, StepPolicy, SwapEach
from poochplan.tensors.host_memory import new_memory_holds
from poochplan.tensors.storages import has_storage
from poochplan.torch_private.tensor_internals import in_backward, without_modes

from .step_function import StepFunction
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


class Summing(Watch):
    """``sums`` has one over each tensor that forward saves; 0 for values at the save points that are ``unwritten``."""

    sums: list[int] | None = None
    unwritten: Container[int] = ()

    def sum_up(self, unwritten: Container[int]) -> None:
        """From here on."""
        self.sums, self.unwritten = [], unwritten

    def pack(self, tensor: torch.Tensor, pack: Pack) -> Handle:
        if self.sums is None or in_backward():
            return super().pack(tensor, pack)
        sum_, handle = _sum(tensor, self.scene.where.type), super().pack(tensor, pack)
        self.sums.append(0 if handle.value is not None and handle.value.index in self.unwritten else sum_)
        return handle


class Verifying(Summing):
    """``verify`` has the verdicts."""

    def __init__(self, scene: Scene, instructions: Instructions) -> None:
        self._stores = contextlib.ExitStack()
        self.verify: Verify = verifying(instructions, scene.model, lambda: self._store(scene))
        super().__init__(scene, self.verify)
        self.rebuild = self.verify.rebuild
        self.swaps_once = True

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        if self.scene.there_before is None:
            self.look_around()
        yield

    def _store(self, scene: Scene) -> HostStore:
        return self._stores.enter_context(contextlib.closing(HostStore(scene.where, scene.spill_dir)))

    def end(self, *, stepped: bool) -> None:
        super().end(stepped=stepped)
        self._stores.close()


def verify(profile: Profile, steps: StepFunction) -> Profile:
    """The profile with ``unreplayable`` set on every value whose replay was tried and failed, by steps run now.

    Replays are compared with what a recorded step has saved, and that, where the step repeats itself, with what one has
    saved that no mode saw. Where these differ nothing is recomputed, since recording alone would change bits. What a
    kernel leaves unwritten holds whatever memory held, so the steps that no mode sees get memory of other bytes each,
    and what differs between them is not compared.
    """
    saved, runner = saved_values(profile), steps.runner
    unwritten = frozenset(at for at, one in enumerate(saved) if profile.values[one].unreplayable.endswith(UNWRITTEN))

    def plain(byte: int) -> list[int]:
        with preserved(runner.model, runner.optimizer), new_memory_holds(byte):
            return _summed(steps.run(_unrecorded(profile, steps.scene, unwritten)))

    first = plain(0)
    other = plain(1) if first == plain(0) else []  # what differs by itself tells nothing of recording
    trials, is_first = verification(profile), True
    trial = next(trials)
    while True:
        watch = Verifying(steps.scene, trial)
        if is_first:
            watch.sum_up(unwritten)
        steps.run(watch)
        if is_first and other and any(a == b != c for a, b, c in zip_longest(first, other, _summed(watch))):
            return without_replays(profile, RECORDED)
        is_first = False
        try:
            trial = trials.send(watch.verify)
        except StopIteration as verified:
            return verified.value


def _unrecorded(profile: Profile, scene: Scene, unwritten: Container[int]) -> Summing:
    """A step that no mode sees. Memory is about what verification takes."""
    rest = Decision.SWAP if profile.mode == "swap-all" else Decision.KEEP
    every = [Decision.KEEP if profile.values[one].pinned else rest for one in saved_values(profile)]
    instructions = msgspec.structs.replace(instructions_for(profile, every), record_from_start=False)
    watch = Summing(scene, Follow(Course.of(instructions), SwapEach()))
    watch.sum_up(unwritten)
    return watch


def _summed(watch: Summing) -> list[int]:
    assert watch.sums is not None
    return watch.sums


def _sum(tensor: torch.Tensor, kind: str) -> int:
    """Over what lies in its storage, as numbers of four bytes; 0 where it has none, or is a part of a larger one, or
    lies elsewhere than what is replayed.
    """
    if not has_storage(tensor, kind) or tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
        return 0
    with without_modes(), torch.no_grad():
        pieces = bytes_of(tensor.untyped_storage()).split(PIECE_BYTES)  # a sum is of numbers of eight bytes
        words = [one[: len(one) // 4 * 4].view(torch.int32) for one in pieces]
        return sum(int(one.sum(dtype=torch.int64)) for one in (*words, pieces[-1][len(words[-1]) * 4 :]))
