"""Segments after the captured one: timed as a whole without the hooks' time, or op by op; or replays are tried."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Generator, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch

from poochplan.formats.occupancy import Floats
from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.profile import Phase
from poochplan.planner.arena.packing import packed
from poochplan.profiler.assembly.reconcile import PhaseSeconds, typical_phases
from poochplan.profiler.capture.capture import Capture
from poochplan.profiler.capture.captured import CapturedOp, shapes_of
from poochplan.profiler.capture.node_ops import is_node, name_of
from poochplan.profiler.capture.workspace import Workspace
from poochplan.profiler.trials.verify_replays import HostStore, Verify, checksum
from poochplan.runtime.arena.step_arena import RepeatedStep
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.saved_value import SavedHandle
from poochplan.runtime.replays.compiled_tape import BelowAutograd, op_clock, serves
from poochplan.runtime.replays.tape import Recorder, Tape
from poochplan.runtime.step_policies.follow import Follow
from poochplan.runtime.step_policies.step_policy import StepPolicy, SwapEach
from poochplan.tensors.host_memory import page_fault_s, page_faults
from poochplan.tensors.modes import compiled_modules
from poochplan.tensors.operators import traits
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
    """``seconds`` of each phase, without those in hooks, and the page ``faults`` of each on the step's thread.
    ``launching_s`` are the processor's seconds of each phase, without those in hooks and without waits for the device.
    Code after a backward counts up to the optimizer's step, if there is one.

    A device's clock measures them, and nothing waits for it between phases: there the launching thread is ahead, as in
    a step that nobody times. Seconds in hooks count where the device has waited for that thread.

    ``arena``: the arena of a step function; None for the ordinary allocator.
    """

    def __init__(self, context: StudyContext, policy: StepPolicy | None, arena: RepeatedStep | None = None) -> None:
        super().__init__(context, policy)
        self._waits = isinstance(policy, SwapEach)
        self.in_hooks = HookSeconds()
        self.faults: dict[Phase, int] = dict.fromkeys(Phase, 0)
        self.launching_s: PhaseSeconds = dict.fromkeys(Phase, 0.0)
        self._arena = arena
        self._since: Any = None
        self._spans: list[tuple[Phase, Any, Any, float]] = []
        """Parts of the step so far: the phase, the marks at begin and end, and the seconds in hooks."""
        self._hooks_s = self._since_processor_s = 0.0
        self._since_faults = 0
        self._is_over = False

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        with self._arena.run() if self._arena is not None else contextlib.nullcontext():
            self.context.clock.synchronize()
            self._since, self._since_faults = self.context.clock.mark(), page_faults()
            self._since_processor_s = self._processor_s()
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
            self._hooks_s += time.perf_counter() - start_s

    def enter(self, phase: Phase) -> None:
        self._account()
        super().enter(phase)

    def end(self, *, stepped: bool) -> None:
        if not self._is_over and stepped:
            self._account()
        self._is_over = True
        self._add_up()
        super().end(stepped=stepped)
        if isinstance(self.policy, Follow):
            self.why_not = self.why_not or self.policy.divergence

    def _account(self) -> None:
        self.launching_s[self.phase] += self._processor_s() - self._since_processor_s
        mark, faults = self.context.clock.mark(), page_faults()
        self._spans.append((self.phase, self._since, mark, self._hooks_s))
        self._hooks_s = 0.0
        self.faults[self.phase] += max(0, faults - self._since_faults)  # less is another thread's count
        self._since, self._since_faults = mark, faults
        self._since_processor_s = self._processor_s()

    def _add_up(self) -> None:
        """Adds the parts so far, once all queued work is done."""
        clock = self.context.clock
        clock.synchronize()
        spans, self._spans = self._spans, []
        taken = [(phase, clock.seconds(begin, end), hooks_s) for phase, begin, end, hooks_s in spans]
        thread_s = sum(self.launching_s.values()) + sum(hooks_s for _, _, hooks_s in taken)
        is_hidden = clock.is_ahead and not self._waits and thread_s < sum(seconds for _, seconds, _ in taken)
        for phase, seconds, hooks_s in taken:
            self.seconds[phase] += seconds if is_hidden else max(0.0, seconds - hooks_s)

    def _processor_s(self) -> float:
        return self.context.clock.processor_s() - self.in_hooks.total_s


class OpTimer(Capture):
    """Seconds of each op (pure views left out), in the order of a capture, which knows no values and no memory."""

    sees_values = False

    def __init__(self, model: torch.nn.Module, where: torch.device) -> None:
        super().__init__(model, where, Workspace())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = traits(func)
        if facts.pure_view or self._paused:
            return self.run_op(func, args, kwargs)
        op = CapturedOp(facts.name, "" if self.phase is Phase.BACKWARD else self.tracker.current(), self.phase)
        begin = self.clock.begin()
        outputs = self.run_op(func, args, kwargs)
        self.took(op, [(begin, self.clock.end())])
        op.shapes = shapes_of(outputs)
        self.ops.append(op)
        return outputs

    def enter(self, phase: Phase) -> None:
        self.phase = phase

    def beside_nodes(self) -> contextlib.AbstractContextManager[None]:
        """A block whose time is no node's."""
        return self.nodes.set_aside()

    def ordinary(self, leaves: list[Any]) -> list[torch.Tensor]:
        return []

    def resized(self, storage: torch.UntypedStorage, before_bytes: int) -> None:
        pass


class CompiledOpTimer(BelowAutograd, OpTimer):
    """The same in C++, which takes a few microseconds of a step for an op: see ``native/op_clock.h``."""

    def __init__(self, model: torch.nn.Module, where: torch.device) -> None:
        super().__init__(model, where)
        self.native = op_clock(self.tracker.running)
        self.enter(self.phase)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with super().running():
            yield
        for name, overload, layer, phase, shapes, seconds in self.native.taken():
            named = name_of(name) if overload is None else f"{name.replace('::', '.')}.{overload or 'default'}"
            self.ops.append(CapturedOp(named, layer, phase, duration_s=seconds, shapes=shapes))

    def observed(self, outputs: Any, run: Callable[[], Any]) -> Any:
        with self.away():
            return self.native.observed(run)

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        self.native.phase = phase

    @contextlib.contextmanager
    def beside_nodes(self) -> Iterator[None]:
        self.native.is_paused = True
        try:
            yield
        finally:
            self.native.is_paused = False


class OpRuns:
    """Times of the captured step's ops from the timed steps so far. ``steps``: their seconds, with the instruments."""

    def __init__(self, captured: list[CapturedOp]) -> None:
        self.steps: list[PhaseSeconds] = []
        self.needs_mode = False
        """Whether torch runs other ops than the captured ones where no mode looks on."""
        self._captured = captured
        self._runs: list[Floats] = []
        self._differences: dict[str, str] = {}

    def add(self, timer: OpTimer, seconds: PhaseSeconds) -> None:
        """Adds a step with its times. It is used if it dispatched the same ops, even if their shapes differ. If it did
        not, and is the first and timed without a mode, that may be the reason: then it is left out.
        """
        what, difference = _first_difference(self._captured, timer.ops)
        if what == "ops" and not self.steps and isinstance(timer, CompiledOpTimer):
            self.needs_mode = True
            return
        self.steps.append(seconds)
        if what:
            self._differences.setdefault(what, difference)
        if what != "ops":
            self._runs.append(timer.durations()[0])

    @property
    def seconds(self) -> Floats | None:
        """Seconds of each op in each step that dispatched the same ops, (steps, ops); None if none did."""
        return np.array(self._runs) if self._runs else None

    @property
    def notes(self) -> list[str]:
        """Where and how steps differ, and what the durations then are; empty if they do not differ."""
        used = len(self._runs)
        of_some = f"of {used} of {len(self.steps)} timed steps" if used else "of the captured step alone"
        for what, those in (("ops", of_some), ("shapes", "medians over such steps")):
            if what in self._differences:
                return [_note(what, self._differences[what], f"op durations are {those}")]
        return []


def difference_note(captured: list[CapturedOp], timer: OpTimer) -> list[str]:
    """A note, if that step dispatched other ops than the captured one, or ops of other shapes."""
    what, difference = _first_difference(captured, timer.ops)
    return [_note(what, difference, "this is one of them")] if what else []


def _note(what: str, difference: str, so: str) -> str:
    return f"steps differ in {'the ops they dispatch' if what == 'ops' else what}, first at {difference}; {so}"


def _first_difference(captured: list[CapturedOp], found: list[CapturedOp]) -> tuple[str, str]:
    """``"ops"``, ``"shapes"`` or nothing, and the first op that differs in it."""
    for index, (one, other) in enumerate(zip_longest(captured, found)):
        if one is None or other is None or (_name(one), _layer(one)) != (_name(other), _layer(other)):
            return "ops", f"op {index}: {_said(one)}, then {_said(other)}"
    for index, (one, other) in enumerate(zip(captured, found, strict=True)):
        if one.shapes != other.shapes and not is_node(one.name):  # those of nodes follow from forward's
            return "shapes", f"op {index}: {_said(one)}, then {_said(other)}"
    return "", ""


UNDER_A_MODE = {
    "aten.add_.Tensor": "aten.add.Tensor",
    "aten.scatter_add_.default": "aten.scatter_add.default",
    "aten.zeros.default": "aten.new_zeros.default",
    "aten._index_put_impl_.default": "aten.index_put.default",
    "autograd.ReshapeAliasBackward0": "autograd.ViewBackward0",
}
"""What torch runs, if a dispatch mode looks on, in place of some ops and nodes: with the same result and geometry."""


def _name(op: CapturedOp) -> str:
    return UNDER_A_MODE.get(op.name, op.name)


def _layer(op: CapturedOp) -> str:
    """Empty in backward, because hooks of the capture influence it there."""
    return "" if op.phase is Phase.BACKWARD else op.layer


def _said(op: CapturedOp | None) -> str:
    if op is None:
        return "no op"
    shapes = f" {list(op.shapes)}".replace("(", "[").replace(")", "]") if op.shapes else ""
    return f"{op.name}{f' in {_layer(op)}' if _layer(op) else ''}{shapes}"


class OpTiming(PhaseTiming):
    """``timer`` has the seconds of each op. The seconds of the phases include the instruments. ``is_compiled``: by
    instruments in C++, which compute nothing otherwise than without them, if they serve here.
    """

    def __init__(
        self,
        context: StudyContext,
        policy: StepPolicy | None,
        arena: RepeatedStep | None = None,
        *,
        is_compiled: bool = False,
    ) -> None:
        super().__init__(context, policy, arena)
        model, where = context.model, context.where
        is_compiled = is_compiled and where.type == "cpu" and serves(where.type) and not compiled_modules(model)
        self.instrument = self.timer = (CompiledOpTimer if is_compiled else OpTimer)(model, where)

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        with self.timer.running(), super().instruments(segment):
            yield

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        self.timer.enter(phase)

    def aside(self, hook: Hook, argument: Any) -> Any:
        with self.timer.beside_nodes():
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
    launching_s: list[PhaseSeconds] = field(default_factory=list)
    """The processor's seconds of every step, without hooks and waits."""

    def several(self, count: int) -> Generator[NewObserver, Any, list[PhaseSeconds]]:
        """The seconds of that many steps, timed whole."""
        seconds = []
        for _ in range(count):
            observer: PhaseTiming = yield lambda: PhaseTiming(self.context, self.policy(), self.arena)
            seconds.append(observer.seconds)
            self.faults.append({phase: float(count) for phase, count in observer.faults.items()})
            self.launching_s.append(observer.launching_s)
            if isinstance(observer.policy, Follow) and not observer.why_not:
                self.in_hooks.append(observer.in_hooks)
        return seconds

    def by_op(self, count: int, runs: OpRuns) -> Generator[NewObserver, Any, None]:
        """Adds that many steps, timed op by op."""
        while len(runs.steps) < count:
            observer: OpTiming = yield lambda: OpTiming(
                self.context, self.policy(), self.arena, is_compiled=not runs.needs_mode
            )
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
    ``unwritten``; there are no sums if these are None. ``is_watched``: by the mode of Python's tape, which may serve
    where the plan runs.
    """

    def __init__(
        self,
        context: StudyContext,
        policy: StepPolicy,
        unwritten: Container[int] | None,
        *,
        is_watched: bool = False,
    ) -> None:
        super().__init__(context, policy)
        self.sums: list[int] = []
        self._unwritten, self._is_watched = unwritten, is_watched

    @contextlib.contextmanager
    def instruments(self, segment: Segment) -> Iterator[None]:
        mode = Recorder(Tape(self.context.where.type))
        if self._is_watched:
            mode.switch_on()
        try:
            yield
        finally:
            mode.leave_stack()

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
            self.look_around(segment)
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
