"""The audit: in each planned step some of the released values are compared with what comes back for them.

It finds writes that no version counter shows and that begin after the profile: by ``.data``, NumPy, a kernel. A value
is *kept beside* where there is room: its storage stays until its use, and that use takes it. So writes until forward's
last reference to it count, as in-core. Otherwise a checksum of it is compared: taken when it is released, or at
the last point at which forward still held it in the step before. What steps swap without a plan is compared, too.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
import weakref
from collections.abc import Container, Iterable, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from poochplan.formats.plan import Decision, PlannedValue
from poochplan.formats.profile_parts import rounded_up
from poochplan.runtime.devices.backend import backend_of
from poochplan.runtime.devices.pinned import small_buffer
from poochplan.tensors.host_memory import available_bytes
from poochplan.tensors.storages import Geometry, bytes_of
from poochplan.torch_private.tensor_internals import unseen_by_modes

from .audited_plan import AuditedPlan, Place, SwapsWithoutPlan
from .saved_value import SavedValue

MOST_SHARE = 0.003
"""Of a step's time may go into comparing; but one value is always compared."""
FIRST_BYTES_PER_S = 1e9
"""The rate of comparing that is assumed before it is measured."""
LARGEST_CHANGE = 2.0
"""By this factor the assumed rate follows the measured one in a step."""
MOST_BYTES_PER_S = 1e12
LOOKS = 8
"""At so many points a checksum is taken anew, in the first step that audits the value."""
PIECE_BYTES = 1 << 24
"""A GPU compares so many bytes of a value at a time, and takes as many for the result."""
SCRATCH_BYTES = 1 << 15
"""What a GPU takes at most to reduce a piece to one number: partial sums of all its blocks."""
RESULT_BYTES = 1 << 10
"""What it takes for the checksum of a value, and the one that it is compared with."""
SHARE_OF_FREE = 0.5
"""Of the device's free memory may go into keeping all values beside."""


class OnAudit(StrEnum):
    """The reaction to a value that does not come back as it was."""

    WARN = "warn"
    """One warning names it; it is kept from then on."""
    ERROR = "error"
    """``AuditError`` is raised at the end of that step."""
    OFF = "off"
    """Nothing is compared."""


Look = tuple[torch.dtype, tuple[int, ...]]


class Audit:
    """State: the values of the running step that are audited, and the names of those that have differed in it."""

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._plan: AuditedPlan | None = None
        self._unplanned = SwapsWithoutPlan()
        self.compares_unplanned = False
        """Whether values are compared that are swapped without a plan."""
        self._looks = set[Look]()
        """Dtypes and shapes of values that have differed."""
        self._most_bytes = self._left_bytes = 0.0
        """What can be compared in the time of a step, and what is left of it. What was too much lacks later."""
        self._room_bytes, self._scratch_bytes = 0, math.inf
        """What is left of the room for keeping values beside, and of what a GPU may take to compare."""
        self._compares_all = False
        self._owners: dict[int, int] = {}
        """By save point of the values that the step has saved and not released yet: what was saved before them."""
        self.watched: list[Beside] = []
        """What is looked at again at each point."""
        self.saves = self.owner = 0
        """The save point that the step has come to, and the storage of the model's that was saved last."""
        self._pending: list[Comparison] = []
        self._bytes_per_s, self._allowed_s, self._took_s = FIRST_BYTES_PER_S, 0.0, 0.0
        self.differing: list[Comparison] = []
        """Of values that did not come back as they were, since this was emptied."""
        self.compared = self.beside_bytes = 0
        """Number of values compared in this step, and bytes of those kept beside it."""

        self.keeps_all = False
        """Whether this step may exceed its budget, because all values are kept beside."""

    def step_begins(self, plan: AuditedPlan, room_bytes: int, scratch_bytes: int, step_s: float) -> None:
        """A segment begins that follows the plan, and takes ``step_s`` seconds. :meth:`step_ends` comes before.
        ``scratch_bytes``: of the device, for comparing; on the CPU this takes none.
        """
        self._plan, self._compares_all = plan, plan.is_alarmed
        self._room_bytes, self._scratch_bytes = room_bytes, math.inf
        if plan.is_alarmed:
            plan.is_alarmed = False
            self.keeps_all = sum(plan.values[one].size_bytes for one in plan.released) <= self._free_bytes()
            return
        self._allowed_s = MOST_SHARE * step_s
        self._most_bytes = self._allowed_s * self._bytes_per_s
        self._left_bytes = self._most_bytes + min(0.0, self._left_bytes)
        if self._where.type != "cpu":
            self._room_bytes, self._scratch_bytes = room_bytes - SCRATCH_BYTES, scratch_bytes - SCRATCH_BYTES

    def step_ends(self) -> None:
        """Forgets what was watched; takes the results of a GPU's comparisons that are there."""
        if self._allowed_s and self._took_s:  # small values take their time whatever their bytes are
            change = min(LARGEST_CHANGE, max(1 / LARGEST_CHANGE, self._allowed_s / self._took_s))
            self._bytes_per_s = min(MOST_BYTES_PER_S, self._bytes_per_s * change)
        self._allowed_s = self._took_s = 0.0
        self._unplanned.step_ends()
        for beside in self.watched:
            if beside.held_at is not None:
                beside.plan.last_held[beside.place] = beside.held_at
        self.watched, self._owners, self.saves, self.owner = [], {}, 0, 0
        self._plan, self.compared, self.beside_bytes = None, 0, 0
        self.keeps_all = self._compares_all = False
        if self._pending:
            self._pending = [one for one in self._pending if not self._is_taken(one)]

    def ends(self) -> list[Comparison]:
        """What differed in the last step of a session whose device has done its work."""
        self.step_ends()
        found, self.differing, self._pending = self.differing, [], []
        return found

    def _is_taken(self, one: Comparison) -> bool:
        if not one.is_done:
            return False
        if one.differs:
            self.differing.append(one)
        return True

    def is_kept(self, index: int | None, tensor: torch.Tensor) -> bool:
        """Whether a value that is now saved is kept, whatever the plan says, because it has differed. ``index``: its
        save point in a step that follows its plan. If it does not, or may leave out layers, all are kept that look the
        same: another save point may stand for that of the plan.
        """
        plan = self._plan
        if plan is not None and index is not None:
            self._owners[index] = self.owner
            if index in plan.kept or not plan.leaves_out:
                return index in plan.kept
        return bool(self._looks) and (tensor.dtype, tensor.shape) in self._looks

    def keep(self, found: Comparison) -> None:
        """A value that has differed is kept from now on, and the next step compares all."""
        found.plan.kept.add(found.index)
        found.plan.is_alarmed = not self.keeps_all
        self._looks.add(found.look)

    # -- values that leave and come back --------------------------------------------------------------------------

    def leaves(self, value: SavedValue) -> None:
        """Its storage is about to be released by the engine, or has been: forward may still hold it."""
        if value.beside is not None or value.storage is None:
            return
        plan, index = self._plan, value.index
        if plan is None or index is None or plan.values[index].decision is Decision.KEEP:
            if self.compares_unplanned and self._unplanned.has_turn():
                self._watch(value, self._unplanned, (self._unplanned.latest, 0), is_beside=False)
        elif index in self._owners:
            place = index, self._owners.pop(index)
            if self._compares_all:
                self._watch(value, plan, place, is_beside=self.keeps_all)
            elif self._scratch_bytes >= RESULT_BYTES and plan.is_next(place, self._most_bytes, self._left_bytes):
                self._watch(value, plan, place, is_beside=self._takes_room(value.size_bytes))

    def _takes_room(self, size_bytes: int) -> bool:
        """Whether there is room to keep a value of that size beside. What its comparison takes is no longer left."""
        takes = self._scratch_bytes < math.inf
        beside_bytes = rounded_up(size_bytes) + (rounded_up(min(size_bytes, PIECE_BYTES)) if takes else 0)
        is_beside = beside_bytes <= min(self._room_bytes, self._scratch_bytes)
        taken_bytes = RESULT_BYTES * takes + beside_bytes * is_beside
        self._room_bytes, self._scratch_bytes = self._room_bytes - taken_bytes, self._scratch_bytes - taken_bytes
        self._left_bytes -= size_bytes
        return is_beside

    def leaves_out(self) -> None:
        """The step leaves out layers of its plan."""
        if self._plan is not None:
            self._plan.leaves_out = True

    def passes(self, storage: int, owned: Container[int]) -> bool:
        """Whether the storage that is now saved is one of those: the place of the values that follow."""
        if storage in owned:
            self.owner = storage
            return True
        return False

    def _watch(self, value: SavedValue, plan: AuditedPlan, place: Place, *, is_beside: bool) -> None:
        assert value.storage is not None
        beside = value.beside = Beside(plan, place, value, value.storage, is_kept=is_beside)
        self.beside_bytes += beside.size_bytes if beside.is_kept else 0
        if not beside.is_kept:
            self.watched.append(beside)
            self._look(beside)

    def _look(self, beside: Beside) -> None:
        """Takes its checksum, unless forward most likely holds it until a later point."""
        if self.saves >= beside.plan.last_held.get(beside.place, 0) and beside.looks < LOOKS:
            begin_s = time.perf_counter()
            beside.look_again()
            self._took_s += time.perf_counter() - begin_s

    def point(self, saves: int) -> None:
        """The step has come to that save point, or with the number of all to its first use."""
        self.saves = saves
        for beside in self.watched:
            if beside.weak() is not None:
                beside.held_at = saves
                self._look(beside)

    def saved_again(self, value: SavedValue, tensor: torch.Tensor) -> None:
        """Another tensor of its storage is saved, perhaps after its release."""
        if value.decision is Decision.KEEP or not (self._plan is not None or self.compares_unplanned):
            return
        part = Geometry.of(tensor)
        if part in value.parts:
            return
        value.other_parts = (*value.other_parts, part)
        if value.beside is not None and not value.beside.is_kept:
            self._look(value.beside)

    def comes_back(self, value: SavedValue) -> None:
        """Its storage is there again. A value kept beside gets back what was kept."""
        beside, value.beside = value.beside, None
        if beside is None or value.storage is None:
            return
        if beside.kept is None and beside.checksum is None:  # forward has let go of it earlier than before
            beside.plan.is_missed(beside.place)
            return
        begin_s = time.perf_counter()
        self.compared += 1
        found = Comparison(beside, value, value.storage)
        if found.is_done:
            self._is_taken(found)
        else:
            self._pending.append(found)
        if beside.kept is not None and (not found.is_done or found.differs):
            value.storage = beside.kept
        self._took_s += time.perf_counter() - begin_s

    def _free_bytes(self) -> float:
        if self._where.type != "cpu":
            return SHARE_OF_FREE * backend_of(self._where).free_bytes()
        return SHARE_OF_FREE * available_bytes()


class Beside:
    """What is known of a value that the engine has released: the storage itself, or a checksum of its parts."""

    def __init__(
        self, plan: AuditedPlan, place: Place, value: SavedValue, storage: torch.UntypedStorage, *, is_kept: bool
    ) -> None:
        self.plan, self.place, self.size_bytes = plan, place, storage.nbytes()
        first = value.parts[0]
        self.look: Look = first.dtype, first.shape
        is_whole = storage.device.type == "cpu" or not self.parts_of(value)  # else comparing takes more memory
        self.is_kept = is_kept and is_whole
        self.kept = storage if self.is_kept else None
        self._value, self.weak = weakref.ref(value), weakref.ref(storage)
        self.looks = 0
        self.held_at: int | None = None
        """The last save point at which forward held it."""
        self.checksum: Any = None
        self.parts: Sequence[Geometry] = ()
        """What the checksum is of."""

    def parts_of(self, value: SavedValue) -> Sequence[Geometry]:
        """What is compared: the tensors that were saved. Forward may go on to write the rest of their storage, as an
        LSTM's cell writes the other gates. Empty if one has all of it.
        """
        return () if any(covers(part, self.size_bytes) for part in value.parts) else value.parts

    def look_again(self) -> None:
        """Takes the checksum of what the storage has now."""
        value, storage = self._value(), self.weak()
        if value is not None and storage is not None and storage.nbytes() == self.size_bytes:
            self.looks, self.parts = self.looks + 1, self.parts_of(value)
            self.checksum = checksum(storage, self.parts)


class Comparison:
    """Of a value that has come back. On a GPU the result is read later, so that nothing waits."""

    def __init__(self, beside: Beside, value: SavedValue, storage: torch.UntypedStorage) -> None:
        self.plan, self.index, self.look, self.is_right = beside.plan, beside.place[0], beside.look, beside.is_kept
        if storage.device.type == "cpu":
            self._differs = _cpu_differs(beside, beside.parts_of(value), storage)
            self._done: torch.Event | None = None
            return
        with unseen_by_modes():
            if beside.kept is not None:
                found = _differs_there(beside.kept, storage)
            else:
                found = torch.ne(checksum(storage, beside.parts), beside.checksum)
            self._result = small_buffer(1).view(torch.bool)
            self._result.copy_(found.view(1), non_blocking=True)
            there = backend_of(storage.device)
            self._done = there.new_event()
            self._done.record(there.current_stream())

    @property
    def planned(self) -> PlannedValue | None:
        """None if no plan has released it."""
        return None if isinstance(self.plan, SwapsWithoutPlan) else self.plan.values[self.index]

    @property
    def is_done(self) -> bool:
        return self._done is None or bool(self._done.query())

    @property
    def differs(self) -> bool:
        """Only if it is done."""
        return self._differs if self._done is None else bool(self._result.item())


def differences_text(found: Sequence[Comparison]) -> str:
    """The text about values that did not come back as they were."""
    named = ", ".join(one.plan.named(one.index) for one in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    is_right = all(one.is_right for one in found)  # their uses took what was kept beside
    used = "backward has used the right ones" if is_right else "this step's gradients, and perhaps earlier ones, differ"
    return (
        f"the audit found other bytes than forward left in {named}{more}: something writes them, or what they are made "
        f"of, past torch's dispatcher (.data, numpy(), DLPack, a kernel); {used}"
    )


_MOST_NAMED = 4


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def covers(geometry: Geometry, size_bytes: int) -> bool:
    """Whether tensors of the geometry have all bytes of their storage, or what they have cannot be told."""
    item_bytes = geometry.dtype.itemsize
    return math.prod(geometry.shape) * item_bytes == size_bytes or item_bytes not in _WORDS


def _memory(storage: torch.UntypedStorage) -> Any:
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def _elements(storage: torch.UntypedStorage, part: Geometry) -> Any:
    """What a part of a storage on the CPU has, in place."""
    item_bytes = part.dtype.itemsize
    strides = [item_bytes * one for one in part.stride]
    return np.ndarray(part.shape, f"u{item_bytes}", _memory(storage), item_bytes * part.offset, strides)


def checksum(storage: torch.UntypedStorage, parts: Sequence[Geometry] = ()) -> Any:
    """The sum of all words, modulo 2^64, and of the bytes behind the last; on the storage's device. Of parts of the
    storage the sum of their elements. On the CPU no memory of torch's is taken.
    """
    if storage.device.type == "cpu":
        if parts:
            return sum(int(np.add.reduce(_elements(storage, one), axis=None, dtype=np.uint64)) for one in parts)
        memory, words = _memory(storage), storage.nbytes() // 8
        whole = int(np.add.reduce(np.frombuffer(memory, np.uint64, words))) if words else 0
        return whole, memory[words * 8 :]
    with unseen_by_modes():
        if parts:
            words_of = (one.on(storage).view(_WORDS[one.dtype.itemsize]) for one in parts)
            return functools.reduce(torch.Tensor.add_, (one.sum(dtype=torch.int64) for one in words_of))
        content = bytes_of(storage)
        end = content.numel() // 8 * 8
        return content[:end].view(torch.int64).sum() + content[end:].sum(dtype=torch.int64)


_C_LIBRARY = ctypes.CDLL(None)
_C_LIBRARY.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _cpu_differs(beside: Beside, parts: Sequence[Geometry], storage: torch.UntypedStorage) -> bool:
    kept = beside.kept
    if kept is None:
        return bool(checksum(storage, beside.parts) != beside.checksum)
    if kept.nbytes() != storage.nbytes():
        return True
    if parts:
        return not all(np.array_equal(_elements(kept, one), _elements(storage, one)) for one in parts)
    return bool(_C_LIBRARY.memcmp(kept.data_ptr(), storage.data_ptr(), storage.nbytes()))


def _differs_there(kept: torch.UntypedStorage, storage: torch.UntypedStorage) -> torch.Tensor:
    """In pieces, because each takes memory."""
    left, right = bytes_of(kept), bytes_of(storage)
    pieces: Iterable[int] = range(0, left.numel(), PIECE_BYTES)
    found = torch.zeros((), dtype=torch.bool, device=storage.device)
    for at in pieces:
        found.logical_or_(torch.ne(left[at : at + PIECE_BYTES], right[at : at + PIECE_BYTES]).any())
    return found
