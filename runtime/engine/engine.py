"""The engine: the saved-tensors hooks, and the parts behind them.

A segment's *step policy* decides (``runtime/step_policies/``), the *mechanism* moves storages, the *cursor* knows where
segments begin and end, the *tape* records ops. States of a saved value: ``saved_value.py``.

Rules, cited in the code:

1. A value is looked up by its storage; all views of one storage are one value, moved once.
2. Parameters (whole ones that FSDP2 gathers, too), buffers, subclasses (but rule 13), sparse tensors and tensors of
   other devices are never touched.
3. No device storage is released, and no storage that a copy fills is used, before the compute stream has waited for the
   copy's end: see ``devices/transfers.py``.
4. A packed tensor that has a graph is stored detached: a graph must not hold itself alive through us.
5. A content is only returned to autograd if its version counter shows no write since it was saved, not even by a
   backward that got it before; otherwise the error that autograd itself would have raised is raised.
6. A returned tensor has the shape, dtype and stride of the saved one.
7. Actions happen only at points of the clock: the first pack of a planned value, the first unpack of a planned handle.
8. When a pack or unpack is not the planned one, nor planned behind whole layers that the step leaves out, the step has
   diverged: no planned action happens any more, values on the device go to the host or stay (as those from before the
   step do), and every value comes back when needed.
9. A value whose copy failed (disk full) stays on the device.
10. A value with decision recompute is released only if its recipe could be made; otherwise it is swapped.
11. While autograd computes a backward no dispatch mode of ours is on the stack, not even a muted one: ATen has other
    formulas for some backwards under a mode.
12. A source is held only as its copy's op has read it: if it was written since, the plan's replays do without it.
13. A DTensor is saved as its local tensor, and returned as a DTensor around that. One written in place is not touched.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from poochplan.errors import DivergenceError
from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.plan_set import Signature
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.metering.census import one_moment
from poochplan.runtime.replays.compiled_tape import recording
from poochplan.runtime.replays.replay import NotReplayable, StorageRecord
from poochplan.runtime.run_report import FallbackKind, Fallbacks
from poochplan.runtime.step_policies.diagnosis import CANNOT_WRITE, KEPT, SAFELY
from poochplan.runtime.step_policies.left_out import LeftOut
from poochplan.runtime.step_policies.step_policy import NOTHING, Actions, Chooser, Diverged, StepPolicy
from poochplan.tensors.modes import Unseen, compiled_modules
from poochplan.tensors.storages import Geometry, Shell, plain_storage, saved_part
from poochplan.torch_private.tensor_internals import in_backward, is_scripted, mode_count, storage_identity

from .audit import Audit
from .cursor import NO_EVENTS, Cursor, Segment, StepEvents, nothing
from .host_tier import HostTier
from .mechanism import Mechanism, rebuild_together
from .own_tensors import OwnTensors
from .saved_value import CLASSES, SavedHandle, SavedValue, held_source

_NOTHING = contextlib.nullcontext()


class Engine:
    """``pack`` and ``unpack`` are the saved-tensors hooks. The other methods tell it the position in the step.

    Parameters
    ----------
    chooser: gives each segment its step policy.
    device: where storages live and copies run; the caller closes it.
    model: its parameters and buffers are those of rule 2.
    parts: if ``model`` consists of several models, each by its name. A segment belongs to one of them.
    on_idle: called when the last handle is gone.
    events: functions to call for events in a step.
    """

    def __init__(
        self,
        chooser: Chooser,
        device: ComputeDevice,
        model: torch.nn.Module,
        *,
        parts: Mapping[str, torch.nn.Module] = MappingProxyType({}),
        on_idle: Callable[[], None] = lambda: None,
        events: StepEvents = NO_EVENTS,
    ) -> None:
        self.device = device
        self._index = -1 if device.where.index is None else device.where.index  # as tensors have it
        self.cursor = Cursor(on_idle)
        self.tape, self.recorder = recording(device.kind, has_compiled=bool(compiled_modules(model)))
        self.host = HostTier(chooser.alternatives)
        self.audit = Audit(device.where)
        self.mechanism = Mechanism(device, self.host, self._copy_failed, self.audit, events, self.tape)
        point, releases = (None if one is nothing else one for one in (events.point, events.releases))
        acts = self.mechanism.transfers.compiled, releases, None if device.spans else rebuild_together
        own = CLASSES, weakref.ref(self), self.audit, point, device, self._index
        self.planned = self.tape.planned_hooks(*own, *acts)
        self._chooser = chooser
        self._policy: StepPolicy | None = None
        self.model = model
        self._parts = parts
        self._events = events
        self.fallbacks = Fallbacks()
        self._own = OwnTensors(self.tape)
        self.lock = threading.RLock()
        self.is_aside = False
        """Whether saved tensors stay with autograd, and values come back without a step policy."""

    @property
    def segment(self) -> Segment:
        """The open segment, or the last one."""
        return self.cursor.segment

    def model_of(self, segment: Segment) -> torch.nn.Module:
        """The model that a segment belongs to; all models if that is not known yet."""
        return self._parts.get(segment.model or "", self.model)

    @property
    def policy(self) -> StepPolicy:
        assert self._policy is not None, "a chooser has to say at the first save"
        return self._policy

    @property
    def follows(self) -> Instructions | None:
        """The instructions of the plan that the open segment follows; None if it follows none."""
        return self._policy.instructions if self._policy is not None else None

    # -- segments ---------------------------------------------------------------------------------------------

    def begin(self, name: str | None = None, *, announced: bool = False) -> None:
        """A segment begins; the open one ends. ``announced``: by the caller, for the model of that name."""
        self.end()
        self.tell_end()
        if self.is_aside:
            return
        before, segment = self.segment, self.cursor.begin()
        segment.announced, segment.model, self.mechanism.report = announced, name, segment.report
        with Unseen():  # parameters may be sparse, and are taken apart
            segment.gradient_bytes = self._own.look_at(self.model_of(segment))
        self.tape.forget(lambda: before.is_held)
        values = self.tape.earlier_values() if self.cursor.holds_values else ()
        segment.left_over = [weakref.ref(value) for value in values if isinstance(value, SavedValue)]
        segment.left_over_bytes = sum(storage.nbytes() for storage in segment.left_over_storages())
        with self.lock:
            if self.host.step_begins():
                self.device.trim_host(self.host.taken())
        self._choose(segment)

    def make_room(self, alternatives: Sequence[Instructions]) -> None:
        """Steps may follow these too from now on. Raises ``OSError`` if the host tier cannot be made that large."""
        with self.lock:
            room = self.host.grow(alternatives)
            if room is not None:
                first, behind = room
                self.device.reserve_host(behind - first, first)

    def model_is_called(self, inputs: Callable[[], Signature], name: str = "") -> None:
        """The model of that name is called. ``inputs`` is called only if the inputs matter."""
        segment = self.segment
        segment.calls += 1
        if segment.model is None:
            segment.model = name
            if name in self._parts:
                with Unseen():
                    segment.gradient_bytes = self._own.look_at(self.model_of(segment))
        if self.cursor.is_open and self._policy is None:  # its chooser needs the inputs first
            segment.inputs = inputs()
            self._choose(segment)

    def end(self) -> None:
        """The open segment ends; handles that are still held stay usable."""
        self.planned.leave()
        self.recorder.switch_off()
        if self.cursor.is_open:
            self._events.over(self.segment)
        self.cursor.end()
        self._policy = None

    def stand_aside(self) -> None:
        """The open segment ends here, and no other begins. Its handles stay usable."""
        self.is_aside = True
        self.planned.leave()
        try:
            self.recorder.leave_stack()
            self.end()
        finally:
            self.cursor.end()
            self._policy = None

    def tell_end(self) -> None:
        """The last segment is over, and its report is final."""
        self.mechanism.take_times()
        self.segment.report.hooks_s += self.planned.take_seconds()
        if self.segment.number:
            self._events.ended(self.segment)

    def optimizer_stepped(self) -> None:
        if self.cursor.optimizer_stepped() and not in_backward():  # if a hook of backward stepped it, more uses come
            self.end()

    def forward_raised(self) -> None:
        """The code that the caller runs now does not belong to the step, and is not recorded."""
        self.segment.raised = True
        self.recorder.switch_off()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A block in which autograd computes (Rule 11). If it has used no saved value, recording continues after it."""
        segment, was_on = self.segment, self.recorder.is_on
        self.recorder.leave_stack()  # a compiler may trace a backward while recording is away, which comes back
        self._events.backward(True)
        try:
            yield
        finally:
            self._events.backward(False)
            if was_on and self.segment is segment and not segment.used:
                self.recorder.switch_on()

    def _choose(self, segment: Segment) -> None:
        try:
            with one_moment():
                policy = self._chooser.choose(segment)
                if policy is None or self.is_aside:
                    return
                self._policy = policy
                self._events.chosen(segment)
            if policy.instructions is not None:
                self.host.follow(policy.instructions)
            self._carry_out(policy.begin(segment))
        except Diverged as reason:
            self._diverge(reason)

    # -- pack -------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> SavedHandle:
        """Forward saves ``tensor``. Returns the object that autograd holds in its place."""
        found: SavedHandle | None = self.planned.pack(tensor)
        if found is not None:
            return found
        return SavedHandle.untouched(tensor) if self.is_aside else self._timed(self._pack, tensor)

    def _timed(self, hook: Callable[[Any], Any], given: Any) -> Any:
        """What the hook returns; users' modes do not see its ops."""
        start_s = time.perf_counter()
        with self.lock:
            was_paused, self.tape.is_paused = self.tape.is_paused, True
            self.planned.engine_runs(True)
            try:
                with Unseen() if mode_count() else _NOTHING:
                    return hook(given)
            finally:
                self.tape.is_paused = was_paused
                self.planned.engine_runs(False)
                self.segment.report.hooks_s += time.perf_counter() - start_s

    def _pack(self, whole: torch.Tensor) -> SavedHandle:
        if in_backward() or is_scripted():  # create_graph, or a checkpoint that runs again: no part of a forward
            return SavedHandle.untouched(whole)
        cursor = self.cursor
        if cursor.save_begins_one():
            self.begin()
            if self.is_aside:
                return SavedHandle.untouched(whole)
        segment, tensor, storage = cursor.segment, whole, plain_storage(whole, self.device.kind)  # Rule 2
        if storage is None:
            tensor = saved_part(whole)  # Rule 13
            storage = None if tensor is whole else plain_storage(tensor, self.device.kind)
            segment.others += storage is None
        if self._own.absent and self._own.have_come():
            segment.gradient_bytes = self._own.look_at(self.model_of(segment))
        if (
            storage is None
            or (type(whole) is not torch.Tensor and self._own.has_parameter(whole))
            or self.audit.passes(storage_identity(storage), self.tape.static)
            or tensor.get_device() != self._index
        ):
            return SavedHandle.untouched(whole)
        if self._policy is None:
            segment.saves_next = True
            self._choose(segment)
            if not cursor.is_open:  # a session that nobody holds ends where the chooser collects garbage
                return SavedHandle.untouched(whole)
        record = self.tape.met(tensor, storage, self.recorder.window)
        known = record.value() if record.value is not None else None
        is_new = not isinstance(known, SavedValue) or not known.stands_for(tensor)  # Rule 1
        if is_new and self.policy.sources and not record.packed:
            self._pass_source(record, tensor)
        shell = None if tensor is whole else Shell.of(whole)
        if is_new or not isinstance(known, SavedValue):
            value = self._save(record, tensor)  # its first handle shares its fields
            if not self._own.absent:
                self.planned.follow(segment, self.policy.followed)
            number, ordinal = segment.number, segment.packs - 1  # no local has the lease: a traceback would keep it
            first = value.probe, value.version, value.geometry, value
            return SavedHandle(*first, cursor.lease(), number, ordinal, shell=shell)
        self._another_handle(record, tensor)
        self.audit.saved_again(known, tensor)
        return SavedHandle.another(tensor, known, cursor.lease(), segment.number, segment.packs - 1, shell)

    def _another_handle(self, record: StorageRecord, tensor: torch.Tensor) -> None:
        segment = self.cursor.segment
        try:
            self.policy.handle(segment.packs, record.save_point, tensor)
        except LeftOut as gap:
            self._pass_over(gap)
            return self._another_handle(record, tensor)
        except Diverged as reason:
            self._diverge(reason)
        segment.packs += 1
        return None

    def _pass_source(self, record: StorageRecord, tensor: torch.Tensor) -> None:
        """Passes the save point of the source of a tensor that is about to be saved, if the plan has one there."""
        segment = self.cursor.segment
        index = segment.saves
        planned = self.policy.sources.get(index)
        if planned is None:
            return
        try:
            self.policy.at_sourced(index, segment.packs, tensor)
        except LeftOut as gap:
            self._pass_over(gap)
            return self._pass_source(record, tensor)
        value = held_source(record, planned, self.device.compute)
        segment.saves += 1
        segment.packs += 1
        self._events.point(segment.saves + segment.uses)
        actions = self.policy.at_source(value, index)
        if value is not None and value.decision is Decision.RECOMPUTE:
            self._forget(value)
        self._carry_out(actions)
        return None

    def _pass_over(self, gap: LeftOut) -> None:
        """The step leaves out some layers of its plan."""
        segment = self.cursor.segment
        if not segment.saves:  # the step's first layers: its clock begins here
            self._events.point(1)
        segment.left_out += gap.saves - segment.saves
        self.audit.leaves_out()
        segment.saves, segment.packs, segment.uses = gap.saves, gap.packs, max(segment.uses, gap.uses)
        for point, actions in gap.actions:
            self._events.point(point)
            self._carry_out(actions)
        self._events.point(segment.saves + segment.uses)

    def _save(self, record: StorageRecord, tensor: torch.Tensor) -> SavedValue:
        segment = self.cursor.segment
        index = None if record.packed else segment.saves  # written since its save point, or gone
        ordinal = segment.packs
        try:
            decision = self.policy.saved(index, ordinal, tensor, record)
            if index is not None:
                record.save_point = index
                segment.saves += 1
                self._events.point(segment.saves + segment.uses)
                self.audit.point(segment.saves)
        except LeftOut as gap:
            self._pass_over(gap)
            if self.policy.sources and index is not None:
                self._pass_source(record, tensor)
            return self._save(record, tensor)
        except Diverged as reason:
            self._diverge(reason)
            index = None
            decision = self.policy.saved(index, ordinal, tensor, record)
        planned = index if self.follows is not None else None
        if decision is not Decision.KEEP and self.audit.is_kept(planned, tensor):
            decision = Decision.KEEP
        segment.packs += 1
        segment.saved_values += 1
        value = SavedValue.of(decision, record, tensor, self.device.compute)
        segment.saved_bytes += tensor.untyped_storage().nbytes()
        record.attach(value)
        record.packed = True
        actions = self.policy.at_save(value, index)
        if decision is Decision.RECOMPUTE:
            self._forget(value)
        self._carry_out(actions)
        return value

    def _forget(self, value: SavedValue) -> None:
        try:
            recipe = self.tape.recipe(value.record, value.generation)
        except NotReplayable as reason:  # Rule 10
            self._fell_back(FallbackKind.NOT_REPLAYABLE, f"{value.name} is swapped, not recomputed: {reason}")
            value.decision = Decision.SWAP
            self._carry_out(self.policy.not_replayable(value, reason))
            return
        self.policy.before_drop(value)
        self.mechanism.lets_go(value)
        value.is_dropped(recipe)

    def unpack(self, handle: SavedHandle) -> torch.Tensor:
        """Backward asks for a saved tensor: brings its value back if necessary."""
        found: torch.Tensor | None = self.planned.unpack(handle)
        if found is not None:
            return found
        if self.is_aside:
            return self.rescued(handle)
        return self._timed(self._unpack, handle)

    def rescued(self, handle: SavedHandle) -> torch.Tensor:
        """The saved tensor, by whatever still has its value: without a step policy, a plan or a meter."""
        with self.lock, Unseen():
            return handle.given_back(self.mechanism.rescued)

    def may_wait(self, handle: SavedHandle) -> Geometry | None:
        """The geometry of the tensor that :meth:`unpack` returns, if compiled code may ask for it later; else None."""
        if handle.value is None or handle.shell is not None:
            return None
        with self.lock:
            self.recorder.switch_off()
        return handle.geometry or Geometry.of(handle.tensor)

    def _unpack(self, handle: SavedHandle) -> torch.Tensor:
        value = handle.value
        if value is not None:
            self.recorder.switch_off()
            if not handle.used:
                handle.used = True
                self._use_point(handle)
        return handle.given_back(self.mechanism.resident)

    def _use_point(self, handle: SavedHandle) -> None:
        segment = self.segment
        if not self.cursor.is_open or handle.segment != segment.number or self._policy is None:
            segment.earlier_uses += handle.segment != segment.number
            if handle.lease is not None and handle.lease.late_uses is not None:
                handle.lease.late_uses.append(handle.ordinal)
            return None
        if not segment.used:
            self.audit.point(segment.saves)
        segment.used = True
        try:
            actions = self._policy.at_use(segment.uses, handle, segment.saves)
        except LeftOut as gap:
            self._pass_over(gap)
            return self._use_point(handle)
        except Diverged as reason:
            self._diverge(reason)
            return None
        segment.uses += 1
        self._events.point(segment.saves + segment.uses)
        self._carry_out(actions)
        return None

    def _carry_out(self, actions: Actions) -> None:
        """At a point (Rule 7)."""
        if actions is NOTHING:
            return
        self.mechanism.carry_out(actions)
        if actions.record is not None:
            (self.recorder.switch_on if actions.record else self.recorder.switch_off)()

    def acts_at_save(self, value: SavedValue) -> None:  # these three are called by native/planned_hooks.h
        with self.lock:
            actions = self.policy.planned_at_save(value.index or 0)
            if value.decision is Decision.RECOMPUTE:
                self._forget(value)
            self._carry_out(actions)

    def acts_at_use(self, number: int) -> None:
        with self.lock:
            self._carry_out(self.policy.planned_at_use(number))

    def resident(self, value: SavedValue) -> torch.UntypedStorage:
        with self.lock:
            return self.mechanism.resident(value)

    def _copy_failed(self, value: SavedValue, error: OSError) -> None:
        if self._policy is not None:
            self._policy.copy_failed(value, error)
        self._fell_back(FallbackKind.HOST_TIER, CANNOT_WRITE.format(error.strerror))

    def _diverge(self, reason: Diverged) -> None:
        """The step is not the planned one from here on (Rule 8)."""
        self.planned.leave()
        reason.__traceback__ = None  # its frames hold values, and itself once their locals have been read
        try:
            self._policy, actions = self.policy.diverged(reason)
        except DivergenceError:
            self.end()
            raise
        self.segment.diverged = True
        self._events.departed()
        self.recorder.switch_off()
        if reason.departure is not None:
            departure = msgspec.structs.replace(reason.departure, step=self.segment.number)
            self.segment.report.departures.append(departure)
        advice = f": {reason.advice}" if reason.advice else ""
        self._fell_back(reason.kind, f"{reason}{advice}; {SAFELY if not self.segment.aside else KEPT}")
        self._carry_out(actions)

    def _fell_back(self, kind: FallbackKind, reason: str) -> None:
        self.fallbacks.count(self.segment.report, kind, reason)
