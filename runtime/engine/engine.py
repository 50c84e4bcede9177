"""The engine: what happens to each saved value, at the points of the plan's clock.

States of the engine: *idle* (no step), *following* the plan, or *diverged* (the step is not the planned one: the safe
policy, swap everything and fetch on demand, until the next step). States of a saved value: see :class:`SavedValue`.

Rules, cited in the code:

1. A value is looked up by its storage; all views of one storage are one value, moved once.
2. Parameters, buffers, subclasses, sparse tensors and tensors of other devices are never touched.
3. No device storage is let go, and nothing that a copy fills is used, before the compute stream has waited for the
   copy's end: see ``devices/transfers.py``.
4. What is packed is stored detached: a graph must not hold itself alive through us.
5. A content is only handed to autograd if its version counter says that nobody has written it since it was saved;
   otherwise the error that autograd itself would have raised is raised.
6. Shape, dtype and stride of what is handed back are those of what was saved.
7. Actions happen only at points of the clock: the first pack of a planned value, the first unpack of a planned handle.
8. When a pack or unpack is not the planned one the step has diverged: nothing planned happens any more, what is on the
   device goes to the host or stays (as what was there before the step does), and every value comes back when needed.
9. A value whose copy failed (disk full) stays on the device.
10. A value that is to be recomputed is let go only if its recipe could be made; otherwise it is swapped.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable
from enum import StrEnum

import torch

from poochplan.errors import DivergenceError
from poochplan.formats.plan import Decision, Instructions, PointActions
from poochplan.formats.plan_set import PlanSet, Signature
from poochplan.runtime.devices.device import Device
from poochplan.runtime.devices.transfers import copy_in, copy_out, raise_held_back
from poochplan.runtime.replays.recorder import RecordedOp, Recorder, StorageRecord
from poochplan.runtime.replays.replay import Leaves, NotReplayable, Recipe, replay, run_ops
from poochplan.runtime.run_report import FallbackKind, StepReport
from poochplan.tensors.modes import Unseen
from poochplan.tensors.storages import is_plain, storage_key
from poochplan.tensors.torch_private import in_backward

from .course import Courses
from .host_slab import HostSlab
from .saved_value import Handle, Lease, SavedValue


class DivergencePolicy(StrEnum):
    """What a step that is not the planned one does."""

    WARN = "warn"
    """Says so once a session; the rest of the step swaps every saved value."""
    ERROR = "error"
    """Raises ``DivergenceError``."""


_DIVERGENCES = {
    FallbackKind.DIVERGED: "the step diverged from the plan at",
    FallbackKind.NO_PLAN: "no plan of the set fits the step by",
}


class Engine:
    """Executes instructions, step after step. ``pack`` and ``unpack`` are the saved-tensors hooks.

    Parameters
    ----------
    given: the instructions to follow; of a set of plans each step follows those of the one for its inputs.
    device: where storages live and copies run; the caller closes it.
    parameters: gives the keys of the storages rule 2 is about, asked once per step.
    on_step_end: told the report of each step when the next begins.
    on_idle: told when the last handle is gone.
    """

    def __init__(
        self,
        given: Instructions | PlanSet,
        device: Device,
        parameters: Callable[[], set[int]],
        *,
        on_divergence: DivergencePolicy = DivergencePolicy.WARN,
        on_step_end: Callable[[StepReport], None] = lambda _: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self._courses = Courses(given)
        self._course = self._courses.first
        self.recorder = Recorder(device.kind)
        self.host = HostSlab(self._courses.instructions)
        self.stats = StepReport()
        self.step = 0
        self._parameters = parameters
        self._on_divergence = on_divergence
        self._on_step_end = on_step_end
        self._on_idle = on_idle
        self._lease: weakref.ref[Lease] | None = None
        self._lock = threading.RLock()
        self._warned: set[FallbackKind] = set()
        self._static: set[int] = set()
        self._begin_clock(active=False)

    # -- the step ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Starts the clock of a new step. The caller has seen to it that the last one has ended."""
        self.end_step()
        if self.step:
            self._on_step_end(self.stats)
        self.step += 1
        self.stats = StepReport(steps=1)
        self._begin_clock(active=True)
        with Unseen():  # parameters may be sparse, and are taken apart
            self._static = self.recorder.static = self._parameters()
        self.recorder.forget(in_use=self.holds_values)
        with self._lock:
            if self.host.step_begins():
                self.device.trim_host(self.host.end_bytes)
        self._awaits_inputs = self._courses.by_inputs
        if not self._awaits_inputs and self.instructions.record_from_start:
            self.recorder.switch_on()

    def inputs_are(self, inputs: Signature) -> None:
        """The model is called with these inputs for the first time in the step: picks the plan of the set.

        Raises ``DivergenceError`` when no plan is large enough and ``on_divergence`` is ``ERROR``.
        """
        self._awaits_inputs = False
        course = self._courses.choose(inputs)
        if course is None:
            self._diverge(self._courses.why_none(inputs), FallbackKind.NO_PLAN)
            return
        self._course = course
        self.host.follow(course.instructions)
        if course.instructions.record_from_start:
            self.recorder.switch_on()

    @property
    def instructions(self) -> Instructions:
        """Those of the current step; one for which there are none keeps those of the step before."""
        return self._course.instructions

    @property
    def awaits_inputs(self) -> bool:
        """Whether the step has begun and :meth:`inputs_are` has to say what plan it follows."""
        return self._active and self._awaits_inputs

    @property
    def has_diverged(self) -> bool:
        """Whether the current step has diverged from its plan, or never had one."""
        return self._diverged

    @property
    def holds_values(self) -> bool:
        """Whether a handle on a saved value is still alive."""
        return self._lease is not None and self._lease() is not None

    def lease(self) -> Lease:
        """What each handle holds; ``on_idle`` is called when nobody holds it any more."""
        lease = self._lease() if self._lease is not None else None
        if lease is None:
            lease = Lease()
            self._lease = weakref.ref(lease)
            weakref.finalize(lease, self._on_idle).atexit = False  # a callback here would go with the engine
        return lease

    @property
    def backward_has_begun(self) -> bool:
        """Whether a handle of the current step has been used, also where the step has diverged."""
        return self._backward_has_begun

    def end_step(self) -> None:
        """Stops recording and the clock; what is still held stays usable."""
        self.recorder.switch_off()
        self._active = False

    def _begin_clock(self, *, active: bool) -> None:
        self._active = active
        self._awaits_inputs = False
        self._diverged = False
        self._saves = 0
        self._packs = 0
        self._uses = 0
        self._backward_has_begun = False
        self._values: weakref.WeakValueDictionary[int, SavedValue] = weakref.WeakValueDictionary()
        self._latest: weakref.ref[SavedValue] | None = None

    # -- pack -------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Forward saves ``tensor``: returns what autograd holds in its place."""
        with self._lock, Unseen():
            raise_held_back()
            if not self._active or (self._backward_has_begun and not self.holds_values):
                self.begin_step()
            if self._outside_the_plan(tensor):
                return Handle(self, None, tensor)
            record = self.recorder.met(tensor)
            value = record.value() if record.value is not None else None
            if value is None or not value.stands_for(tensor):
                value = self._new_value(record, tensor)  # Rule 1
                value.home = self.device.compute
            elif not self._diverged:
                self._expect_handle(value.index, tensor)
            self._packs += 1
            return Handle(self, value, tensor, self._packs - 1)

    def _outside_the_plan(self, tensor: torch.Tensor) -> bool:
        return (
            not is_plain(tensor, self.device.kind)  # Rule 2
            or tensor.device != self.device.where
            or storage_key(tensor) in self._static
            or in_backward()  # packs inside backward: create_graph, reentrant checkpoint
        )

    def _new_value(self, record: StorageRecord, tensor: torch.Tensor) -> SavedValue:
        if record.packed:  # written since its save point, or saved anew after all its handles had gone
            value = SavedValue(None, self._safe_decision(record) if self._diverged else Decision.KEEP, record, tensor)
            record.attach(value)
            if self._diverged:
                self._swap_soon(value)
            return value
        index = self._next_save_point(tensor)
        planned = None if index is None else self.instructions.values[index]
        decision = self._safe_decision(record) if planned is None else planned.decision
        value = SavedValue(index, decision, record, tensor)
        record.attach(value)
        record.packed = True
        if planned is None or index is None:
            self._swap_soon(value)
            return value
        value.name = planned.name
        self._values[index] = value
        if decision is Decision.RECOMPUTE:
            self._forget(value, record)
        self._act(self._course.actions_at_save(index))
        if self._saves == len(self.instructions.values):
            self.recorder.switch_off()  # nothing that comes now is replayed; backward must not run under it
        return value

    def _next_save_point(self, tensor: torch.Tensor) -> int | None:
        if self._diverged:
            return None
        if self._awaits_inputs:
            self._awaits_inputs = False
            self._diverge(
                "something saved before its model is called: a set picks the plan by the model's inputs",
                FallbackKind.NO_PLAN,
            )
            return None
        index = self._saves
        reason = self._course.why_not_save(index, tensor)
        if reason:
            self._diverge(reason)
            return None
        if not self._expect_handle(index, tensor):
            return None
        self._saves += 1
        return index

    def _expect_handle(self, index: int | None, tensor: torch.Tensor) -> bool:
        reason = self._course.why_not_handle(self._packs, index, tensor)
        if reason:
            self._diverge(reason)
        return not reason

    def _forget(self, value: SavedValue, record: StorageRecord) -> None:
        try:
            value.recipe = Recipe(record, value.generation)
        except NotReplayable as reason:  # Rule 10
            self._count_fallback(FallbackKind.NOT_REPLAYABLE, f"{value.name} is swapped, not recomputed: {reason}")
            value.decision = Decision.SWAP
            self._swap_soon(value)
            return
        value.storage = None

    # -- unpack -----------------------------------------------------------------------------------------------

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Backward asks for a saved tensor: brings its value back if need be."""
        with self._lock, Unseen():
            raise_held_back()
            if handle.value is not None:
                self.recorder.switch_off()
                if not handle.used:
                    handle.used = True
                    self._use_point(handle)
            handle.check_version()  # Rule 5
            if handle.value is None or handle.geometry is None:
                return handle.tensor
            return handle.geometry.on(self._resident(handle.value))  # Rule 6

    def _use_point(self, handle: Handle) -> None:
        if not self._active or handle.step != self.step:
            return
        self._backward_has_begun = True
        if self._diverged:
            return
        reason = self._course.why_not_use(self._uses, handle.ordinal, self._saves)
        if reason:
            self._diverge(reason)
            return
        actions = self._course.actions_at_use(self._uses)
        self._uses += 1
        self._act(actions)

    def _resident(self, value: SavedValue) -> torch.UntypedStorage:
        """The value's device storage, filled: waits for its copy, fetches it, or replays it."""
        if value.waits_for_replay:
            self._replay(value)
        elif value.storage is None:
            self._prefetch(value)
        self.stats.stall_s += value.arrived()
        assert value.storage is not None
        if value.home is not None:
            self.device.use(value.storage, value.home)
        return value.storage

    # -- actions (Rule 7) -------------------------------------------------------------------------------------

    def _act(self, actions: PointActions) -> None:
        for index in actions.swap_out:
            self._with(index, self._swap_out)
        for index in actions.release:
            self._with(index, self._release)
        for index in actions.prefetch:
            self._with(index, self._prefetch)
        for index in actions.replay:
            self._with(index, self._replay)
        if actions.record == "on":
            self.recorder.switch_on()
        elif actions.record == "off":
            self.recorder.switch_off()

    def _with(self, index: int, act: Callable[[SavedValue], object]) -> None:
        value = self._values.get(index)
        if value is not None:
            act(value)

    def _swap_out(self, value: SavedValue) -> None:
        if value.storage is None or value.out_copy is not None or value.decision is not Decision.SWAP:
            return
        offset = self.host.place(value)
        with self.device.span(f"swap out {value.name}"):
            value.out_copy = copy_out(self.device, value.storage, offset)
        value.host_offset = offset
        self.stats.out_bytes += value.size_bytes

    def _release(self, value: SavedValue) -> None:
        if value.storage is None or value.out_copy is None:
            return
        self.stats.stall_s += value.out_copy.wait()  # Rule 3
        if value.out_copy.error is not None:  # Rule 9
            reason = f"values are kept: the host tier cannot be written ({value.out_copy.error.strerror})"
            offset = value.host_offset
            value.host_offset, value.out_copy, value.decision = -1, None, Decision.KEEP
            self.host.give_up(offset)  # last: from here on the place may be another value's
            self._count_fallback(FallbackKind.HOST_TIER, reason)
            return
        value.storage = None

    def _prefetch(self, value: SavedValue) -> None:
        if value.storage is not None or value.host_offset < 0:
            return
        with self.device.span(f"prefetch {value.name}"):
            storage, value.home = self.device.allocate(value.size_bytes), self.device.compute
            value.in_copy = copy_in(self.device, storage, value.host_offset)
            value.storage = storage  # last: without its copy it would count as filled
        self.stats.in_bytes += value.size_bytes

    def _replay(self, value: SavedValue) -> list[SavedValue]:
        """Replays it if it waits for that; all that came back."""
        if not value.waits_for_replay:
            return []
        start_s = time.perf_counter()
        with self.device.span(f"replay {value.name}"), self.device.replaying():
            back = replay(value, self._resident, self._run_ops)
        for rebuilt in back:
            rebuilt.home = self.device.compute
        self.stats.replayed_values += len(back)
        self.stats.replay_s += time.perf_counter() - start_s
        return back

    def _run_ops(
        self, ops: list[RecordedOp], there: Leaves, keep: set[StorageRecord], device_type: str
    ) -> dict[StorageRecord, torch.UntypedStorage]:
        return run_ops(ops, there, keep, device_type)

    # -- divergence (Rule 8) ----------------------------------------------------------------------------------

    def _swap_soon(self, value: SavedValue) -> None:
        """The safe policy: swap at once, and let go of all but the latest when the next value comes."""
        self._swap_out(value)
        latest = self._latest() if self._latest is not None else None
        if latest is not None:
            self._release(latest)
        self._latest = weakref.ref(value)

    def _safe_decision(self, record: StorageRecord) -> Decision:
        """Swap, but for what others hold all the same (a data set of which the step has a part): that frees nothing."""
        return Decision.KEEP if self.recorder.was_there(record) else Decision.SWAP

    def _diverge(self, reason: str, kind: FallbackKind = FallbackKind.DIVERGED) -> None:
        what = f"{_DIVERGENCES[kind]} {reason}"
        if self._on_divergence is DivergencePolicy.ERROR:
            self.end_step()
            raise DivergenceError(f"{what}; make a new profile and plan for this step")
        self._diverged = True
        self.recorder.switch_off()
        self._count_fallback(kind, f"{what}; the rest of it swaps every saved value")
        for value in list(self._values.values()):
            self._swap_soon(value)

    def _count_fallback(self, kind: FallbackKind, reason: str) -> None:
        self.stats.fallbacks += 1
        self.stats.fallback_kinds[kind] = self.stats.fallback_kinds.get(kind, 0) + 1
        if reason not in self.stats.fallback_reasons:
            self.stats.fallback_reasons.append(reason)
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"poochplan: {reason} (slower or larger than planned, not wrong; said once)",
                RuntimeWarning,
                stacklevel=2,
            )
