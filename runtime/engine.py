"""The engine: what happens to each saved value, at the points of the plan's clock.

States of the engine: *idle* (no step), *following* the plan, or *astray* (the step left the plan; the safe policy, swap
everything and fetch on demand, until the next step). States of a saved value: see :class:`Entry`.

Rules, cited in the code:

1. A value is looked up by its storage; all views of one storage are one value, moved once.
2. Parameters, buffers, subclasses, sparse tensors and tensors of other devices are never touched.
3. No device storage is let go, and nothing that a copy fills is used, before the compute stream has waited for the
   copy's end: see ``transfers.py``.
4. What is packed is stored detached: a graph must not hold itself alive through us.
5. A content is only handed to autograd if its version counter says that nobody has written it since it was saved;
   otherwise the error that autograd itself would have raised is raised.
6. Shape, dtype and stride of what is handed back are those of what was saved.
7. Actions happen only at points of the clock: the first pack of a planned value, the first unpack of a planned handle.
8. When a pack or unpack is not the planned one the step is astray: nothing planned happens any more, what is on the
   device goes to the host or stays, and every value comes back when it is needed.
9. A value whose copy failed (disk full) stays on the device.
10. A value that is to be recomputed is let go only if its recipe could be made; otherwise it is swapped.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable

import torch

from ..errors import DivergenceError
from ..planner.plan_set import PlanSet, Signature
from ..planner.schema import Decision, Plan, PointActions
from .course import Courses
from .device import Device
from .entry import Entry, Handle, Lease
from .host import HostSlab
from .recorder import RecordedOp, Recorder, Slot
from .replay import Leaves, NotReplayable, Recipe, replay, run_ops
from .report import StepReport
from .storages import is_plain
from .transfers import copy_in, copy_out, raise_held_back


class Engine:
    """Executes a plan, step after step. ``pack`` and ``unpack`` are the saved-tensors hooks.

    Parameters
    ----------
    plans: the plan to follow; of a set each step follows the one for its inputs.
    device: where storages live and copies run; the caller closes it.
    parameters: gives the keys of the storages rule 2 is about, asked once per step.
    on_divergence: ``warn`` (once a session) or ``error``.
    on_step_end: told the report of each step when the next begins.
    on_idle: told when the last handle is gone.
    """

    def __init__(
        self,
        plans: Plan | PlanSet,
        device: Device,
        parameters: Callable[[], set[int]],
        *,
        on_divergence: str = "warn",
        on_step_end: Callable[[StepReport], None] = lambda _: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self._courses = Courses(plans)
        self._course = self._courses.first
        self.recorder = Recorder(device.kind)
        self.host = HostSlab(self._courses.plans)
        self.stats = StepReport()
        self.step = 0
        self._parameters = parameters
        self._on_divergence = on_divergence
        self._on_step_end = on_step_end
        self._on_idle = on_idle
        self._lease: weakref.ref[Lease] | None = None
        self._lock = threading.RLock()
        self._warned: set[str] = set()
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
        self._static = self.recorder.static = self._parameters()
        self.recorder.forget(in_use=self.holds_values)
        self._awaits_inputs = self._courses.by_inputs
        if not self._awaits_inputs and self.plan.record_from_start:
            self.recorder.switch_on()

    def inputs_are(self, inputs: Signature) -> None:
        """The model is called with these inputs for the first time in the step: picks the plan of the set.

        Raises ``DivergenceError`` when no plan is large enough and ``on_divergence`` is ``error``.
        """
        self._awaits_inputs = False
        course = self._courses.choose(inputs)
        if course is None:
            self._go_astray(self._courses.why_none(inputs), "no plan of the set fits the step by ")
            return
        self._course = course
        self.host.follow(course.plan)
        if course.plan.record_from_start:
            self.recorder.switch_on()

    @property
    def plan(self) -> Plan:
        """The plan of the current step; one that has none has left that of the step before."""
        return self._course.plan

    @property
    def awaits_inputs(self) -> bool:
        """Whether the step has begun and :meth:`inputs_are` has to say what plan it follows."""
        return self._active and self._awaits_inputs

    @property
    def has_left_the_plan(self) -> bool:
        """Whether the current step has left its plan, or never had one."""
        return self._astray

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
        """Whether the current step has had a use point."""
        return self._uses > 0

    def end_step(self) -> None:
        """Stops recording and the clock; what is still held stays usable."""
        self.recorder.switch_off()
        self._active = False

    def _begin_clock(self, *, active: bool) -> None:
        self._active = active
        self._awaits_inputs = False
        self._astray = False
        self._saves = 0
        self._packs = 0
        self._uses = 0
        self._entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self._latest: weakref.ref[Entry] | None = None

    # -- pack -------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Forward saves ``tensor``: returns what autograd holds in its place."""
        with self._lock:
            raise_held_back()
            if not self._active or (self._uses and not self.holds_values):
                self.begin_step()
            if self._outside_the_plan(tensor):
                return Handle(self, None, tensor)
            slot = self.recorder.met(tensor)
            entry = slot.entry() if slot.entry is not None else None
            if entry is None or not entry.stands_for(tensor):
                entry = self._new_entry(slot, tensor)  # Rule 1
                entry.home = self.device.compute
            elif not self._astray:
                self._expect_handle(entry.index, tensor)
            self._packs += 1
            return Handle(self, entry, tensor, self._packs - 1)

    def _outside_the_plan(self, tensor: torch.Tensor) -> bool:
        return (
            not is_plain(tensor, self.device.kind)  # Rule 2
            or tensor.device != self.device.where
            or tensor.untyped_storage()._cdata in self._static
            or torch._C._current_graph_task_id() != -1  # packs inside backward: create_graph, reentrant checkpoint
        )

    def _new_entry(self, slot: Slot, tensor: torch.Tensor) -> Entry:
        if slot.packed:  # written since its save point, or saved anew after all its handles had gone
            entry = Entry(None, Decision.SWAP if self._astray else Decision.KEEP, slot, tensor)
            slot.attach(entry)
            if self._astray:
                self._swap_soon(entry)
            return entry
        index = self._next_save_point(tensor)
        planned = None if index is None else self.plan.values[index]
        decision = Decision.SWAP if planned is None else planned.decision
        entry = Entry(index, decision, slot, tensor)
        slot.attach(entry)
        slot.packed = True
        if planned is None or index is None:
            self._swap_soon(entry)
            return entry
        entry.name = planned.name
        self._entries[index] = entry
        if decision is Decision.RECOMPUTE:
            self._forget(entry, slot)
        self._act(self._course.actions_at_save(index))
        if self._saves == len(self.plan.values):
            self.recorder.switch_off()  # nothing that comes now is replayed; backward must not run under it
        return entry

    def _next_save_point(self, tensor: torch.Tensor) -> int | None:
        if self._astray:
            return None
        if self._awaits_inputs:
            self._awaits_inputs = False
            self._go_astray(
                "something saved before its model is called: a set picks the plan by the model's inputs",
                "no plan of the set fits the step by ",
            )
            return None
        index = self._saves
        reason = self._course.why_not_save(index, tensor)
        if reason:
            self._go_astray(reason)
            return None
        if not self._expect_handle(index, tensor):
            return None
        self._saves += 1
        return index

    def _expect_handle(self, index: int | None, tensor: torch.Tensor) -> bool:
        reason = self._course.why_not_handle(self._packs, index, tensor)
        if reason:
            self._go_astray(reason)
        return not reason

    def _forget(self, entry: Entry, slot: Slot) -> None:
        try:
            entry.recipe = Recipe(slot, entry.generation)
        except NotReplayable as reason:  # Rule 10
            self._count_fallback(f"{entry.name} is swapped, not recomputed: {reason}")
            entry.decision = Decision.SWAP
            self._swap_soon(entry)
            return
        entry.storage = None

    # -- unpack -----------------------------------------------------------------------------------------------

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Backward asks for a saved tensor: brings its value back if need be."""
        with self._lock:
            raise_held_back()
            if handle.entry is not None:
                self.recorder.switch_off()
                if not handle.used:
                    handle.used = True
                    self._use_point(handle)
            handle.check_version()  # Rule 5
            if handle.entry is None or handle.geometry is None:
                return handle.tensor
            return handle.geometry.on(self._resident(handle.entry))  # Rule 6

    def _use_point(self, handle: Handle) -> None:
        if self._astray or not self._active or handle.step != self.step:
            return
        reason = self._course.why_not_use(self._uses, handle.ordinal, self._saves)
        if reason:
            self._go_astray(reason)
            return
        actions = self._course.actions_at_use(self._uses)
        self._uses += 1
        self._act(actions)

    def _resident(self, entry: Entry) -> torch.UntypedStorage:
        """The value's device storage, filled: waits for its copy, fetches it, or replays it."""
        if entry.waits_for_replay:
            self._replay(entry)
        elif entry.storage is None:
            self._prefetch(entry)
        self.stats.stall_s += entry.arrived()
        assert entry.storage is not None
        if entry.home is not None:
            self.device.use(entry.storage, entry.home)
        return entry.storage

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

    def _with(self, index: int, act: Callable[[Entry], object]) -> None:
        entry = self._entries.get(index)
        if entry is not None:
            act(entry)

    def _swap_out(self, entry: Entry) -> None:
        if entry.storage is None or entry.out_copy is not None or entry.decision is not Decision.SWAP:
            return
        offset = self.host.place(entry)
        with self.device.span(f"swap out {entry.name}"):
            entry.out_copy = copy_out(self.device, entry.storage, offset)
        entry.host_offset = offset
        self.stats.out_bytes += entry.size_bytes

    def _release(self, entry: Entry) -> None:
        if entry.storage is None or entry.out_copy is None:
            return
        self.stats.stall_s += entry.out_copy.wait()  # Rule 3
        if entry.out_copy.error is not None:  # Rule 9
            reason = f"values are kept: the host tier cannot be written ({entry.out_copy.error.strerror})"
            entry.host_offset, entry.out_copy, entry.decision = -1, None, Decision.KEEP
            self._count_fallback(reason)
            return
        entry.storage = None

    def _prefetch(self, entry: Entry) -> None:
        if entry.storage is not None or entry.host_offset < 0:
            return
        with self.device.span(f"prefetch {entry.name}"):
            storage, entry.home = self.device.allocate(entry.size_bytes), self.device.compute
            entry.in_copy = copy_in(self.device, storage, entry.host_offset)
            entry.storage = storage  # last: without its copy it would count as filled
        self.stats.in_bytes += entry.size_bytes

    def _replay(self, entry: Entry) -> list[Entry]:
        """Replays it if it waits for that; all that came back."""
        if not entry.waits_for_replay:
            return []
        start_s = time.perf_counter()
        with self.device.span(f"replay {entry.name}"), self.device.replaying():
            back = replay(entry, self._resident, self._run_ops)
        for value in back:
            value.home = self.device.compute
        self.stats.replayed_values += len(back)
        self.stats.replay_s += time.perf_counter() - start_s
        return back

    def _run_ops(
        self, ops: list[RecordedOp], there: Leaves, keep: set[Slot], device_type: str
    ) -> dict[Slot, torch.UntypedStorage]:
        return run_ops(ops, there, keep, device_type)

    # -- off the plan (Rule 8) --------------------------------------------------------------------------------

    def _swap_soon(self, entry: Entry) -> None:
        """The safe policy: swap at once, and let go of all but the latest when the next value comes."""
        self._swap_out(entry)
        latest = self._latest() if self._latest is not None else None
        if latest is not None:
            self._release(latest)
        self._latest = weakref.ref(entry)

    def _go_astray(self, reason: str, what: str = "the step left the plan at ") -> None:
        if self._on_divergence == "error":
            self.end_step()
            raise DivergenceError(f"{what}{reason}; make a new profile and plan for this step")
        self._astray = True
        self.recorder.switch_off()
        self._count_fallback(f"{what}{reason}; the rest of it swaps every saved value")
        for entry in list(self._entries.values()):
            self._swap_soon(entry)

    def _count_fallback(self, reason: str) -> None:
        self.stats.fallbacks += 1
        kind = reason.split(":")[0].split(" at ")[0].split(" by ")[0]
        if reason not in self.stats.fallback_reasons:
            self.stats.fallback_reasons.append(reason)
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"poochplan: {reason} (slower or larger than planned, not wrong; said once)",
                RuntimeWarning,
                stacklevel=2,
            )
