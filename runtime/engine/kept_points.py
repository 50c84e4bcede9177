"""KeptPoints: one call for the pack, and one for the unpack, of a kept value where its plan has no action.

Most points of most plans are such. They do what ``Engine._pack`` and ``Engine._unpack`` do for any value (engine rules
1, 2, 4, 5, 7), and nothing where something else may be due: then those have to.
"""

from __future__ import annotations

import threading

import torch

from poochplan.formats.plan import Decision
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.replays.replay import StorageRecord
from poochplan.runtime.replays.tape import Recorder, Tape
from poochplan.runtime.step_policies.step_policy import Kept, StepPolicy
from poochplan.tensors.storages import plain_storage
from poochplan.torch_private.tensor_internals import (
    OUTSIDE,
    graph_task,
    is_scripted,
    mode_count,
    storage_identity,
    version_of,
)

from .audit import Audit
from .cursor import Cursor, StepEvents, nothing
from .own_tensors import OwnTensors
from .saved_value import SavedHandle, SavedValue


class KeptPoints:
    """It has the engine's own parts, and no state."""

    def __init__(
        self,
        lock: threading.RLock,
        cursor: Cursor,
        tape: Tape,
        recorder: Recorder,
        own: OwnTensors,
        audit: Audit,
        device: ComputeDevice,
        events: StepEvents,
    ) -> None:
        self._lock, self._cursor, self._tape, self._recorder = lock, cursor, tape, recorder
        self._own, self._audit, self._device, self._kind = own, audit, device, device.kind
        self._index = -1 if device.where.index is None else device.where.index  # as tensors have it
        self._point = None if events.point is nothing else events.point

    def pack(self, tensor: torch.Tensor, policy: StepPolicy | None) -> SavedHandle | None:
        """The handle of a tensor that is saved; None, and nothing has happened, if it is not what is planned next, or
        may be anything else than kept.
        """
        if policy is None or policy.kept is None or mode_count() != self._recorder.is_on:  # there are users' modes
            return None
        plan, segment = policy.kept, self._cursor.segment
        ordinal = segment.packs
        if ordinal >= len(plan.handles) or type(tensor) is not torch.Tensor:
            return None
        index = plan.handles[ordinal]
        kept = plan.values[index]
        if kept is None or segment.used or segment.raised or self._own.absent:
            return None
        storage = plain_storage(tensor, self._kind)
        if storage is None or storage_identity(storage) in self._tape.static or tensor.get_device() != self._index:
            return None
        if graph_task() != OUTSIDE or is_scripted():
            return None
        with self._lock:
            record = self._tape.met(tensor, storage, self._recorder.window)
            if record.packed:
                return self._another(tensor, policy, record, index)
            dtype, shape, size_bytes, _ = kept
            if segment.saves != index or record.value is not None or tensor.dtype is not dtype:
                return None
            if tensor.shape != shape or storage.nbytes() != size_bytes:
                return None
            return self._first(tensor, policy, record, kept)

    def _first(self, tensor: torch.Tensor, policy: StepPolicy, record: StorageRecord, kept: Kept) -> SavedHandle:
        """The handle of a value at its save point."""
        segment, value = self._cursor.segment, SavedValue.of(Decision.KEEP, record, tensor, self._device.compute)
        ordinal, index = segment.packs, segment.saves
        value.index, value.name = index, kept[3]
        segment.packs, segment.saves = ordinal + 1, index + 1
        segment.saved_values += 1
        segment.saved_bytes += value.size_bytes
        record.attach(value)
        record.save_point, record.packed = index, True
        if self._point is not None:
            self._point(segment.saves + segment.uses)
        self._audit.point(segment.saves)
        policy.passes_save(value, ordinal)
        first = value.probe, value.version, None, value
        return SavedHandle(*first, self._cursor.lease(), segment.number, ordinal)

    def _another(
        self, tensor: torch.Tensor, policy: StepPolicy, record: StorageRecord, index: int
    ) -> SavedHandle | None:
        value = record.value() if record.value is not None else None
        if not isinstance(value, SavedValue) or record.save_point != index or not value.stands_for(tensor):
            return None
        segment = self._cursor.segment
        ordinal = segment.packs
        policy.passes_handle(ordinal)
        segment.packs = ordinal + 1
        return SavedHandle.another(tensor, value, self._cursor.lease(), segment.number, ordinal, None)

    def unpack(self, handle: SavedHandle, policy: StepPolicy | None) -> torch.Tensor | None:
        """The tensor of a handle that is the planned one, where nothing else is planned; it has then had its use point.
        Else None.
        """
        if policy is None or policy.kept is None or handle.geometry is not None or handle.shell is not None:
            return None
        plan, segment = policy.kept, self._cursor.segment
        number = segment.uses
        if number >= len(plan.uses) or plan.uses[number] != handle.ordinal or handle.used or not segment.used:
            return None
        if handle.segment != segment.number or segment.saves != len(plan.values) or not self._cursor.is_open:
            return None
        with self._lock:
            handle.used = True
            segment.uses = number + 1
            if self._point is not None:
                self._point(segment.saves + segment.uses)
        if version_of(handle.tensor) != handle.version:  # Rule 5
            handle.check_version()
        return handle.tensor
