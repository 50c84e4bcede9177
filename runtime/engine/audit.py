"""The audit: in each planned step some of the released values are compared with what comes back for them.

It finds writes that no version counter shows and that begin after the profile: by ``.data``, NumPy, a kernel. A value
is *kept beside* where there is room: its storage stays until its use, and that use takes it. So writes until forward's
last reference to it count, as in-core. Otherwise a checksum of it is compared: taken when it is released, or at
the last point at which forward still held it in the step before. What steps swap without a plan is compared, too.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from poochplan.formats.plan import Decision, Instructions, PlannedValue
from poochplan.formats.profile_parts import rounded_up
from poochplan.runtime.devices.pinned import small_buffer
from poochplan.tensors.host_memory import available_bytes
from poochplan.tensors.storages import Geometry, bytes_of
from poochplan.torch_private.tensor_internals import unseen_by_modes

from .saved_value import SavedValue

MOST_SHARE = 0.003
"""Of a step's time may go into comparing; but one value is always compared."""
FIRST_BYTES_PER_S = 1e9
"""The rate of comparing that is assumed before it is measured."""
LARGEST_CHANGE = 2.0
"""By this factor the assumed rate follows the measured one in a step."""
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


class AuditedPlan:
    """State: the released values of a plan whose turn comes next, and those that are kept from now on."""

    def __init__(self, instructions: Instructions) -> None:
        self.values = instructions.values
        released = [
            index for index, value in enumerate(self.values) if value.decision is not Decision.KEEP and not value.source
        ]
        self._turns = {False: released, True: list(released)}
        """Save points by turn. In steps that leave out layers another value may stand at one, so they have their own.
        """
        self._missed = {False: set[int](), True: set[int]()}
        """Those whose turn it was in a step that did not release them. They are compared as soon as one does."""
        self.leaves_out = False
        """Whether steps leave out layers."""
        self.kept = set[int]()
        """Save points of values that have differed."""
        self.last_held: dict[int, int] = {}
        """The last save point at which forward held a value after its release, as the step before has shown."""
        self.is_alarmed = False
        """Whether the next step compares all, because what has changed one value may have changed others."""

    @property
    def released(self) -> list[int]:
        """Save points of all values that are compared in turn."""
        return [index for index in self._turns[False] if index not in self.kept]

    def chosen(self, room_bytes: int, most_bytes: float, scratch_bytes: float = math.inf) -> dict[int, bool]:
        """The values of the next step, those first that have waited longest, and whether each is kept beside. So many
        bytes can be compared in the time that there is. ``scratch_bytes``: what comparing may take; finite on a GPU.
        """
        found: dict[int, bool] = {}
        takes = scratch_bytes < math.inf
        if takes:
            scratch_bytes, room_bytes = scratch_bytes - SCRATCH_BYTES, room_bytes - SCRATCH_BYTES
        kinds = (False, True) if self.leaves_out else (False,)
        missed = set[int]().union(*map(self._missed.__getitem__, kinds))
        for index in itertools.chain(self._next(kinds, missed), missed):
            size_bytes = self.values[index].size_bytes
            is_due = len(found) < len(kinds) or index in missed
            if scratch_bytes < RESULT_BYTES:
                break
            if not is_due and size_bytes > most_bytes:
                most_bytes = 0
                continue
            most_bytes -= size_bytes
            beside_bytes = rounded_up(size_bytes) + (rounded_up(min(size_bytes, PIECE_BYTES)) if takes else 0)
            found[index] = beside_bytes <= min(room_bytes, scratch_bytes)
            taken_bytes = RESULT_BYTES * takes + (beside_bytes if found[index] else 0)
            room_bytes, scratch_bytes = room_bytes - taken_bytes, scratch_bytes - taken_bytes
        return found

    def _next(self, kinds: Sequence[bool], missed: set[int]) -> Iterator[int]:
        """Other values by turn; of steps of both kinds if there are both, because it is not known yet which comes."""
        seen = self.kept | missed
        for index in itertools.chain.from_iterable(zip(*map(self._turns.__getitem__, kinds), strict=True)):
            if index not in seen:
                seen.add(index)
                yield index

    def ended(self, compared: set[int], absent: set[int], *, left_out: bool) -> None:
        """A step is over. Values have their next turn last if they were compared, or chosen and absent."""
        self.leaves_out |= left_out
        self._missed[left_out] = (self._missed[left_out] | absent) - compared - self.kept
        self._turns[left_out].sort(key=(compared | absent).__contains__)

    def named(self, index: int) -> str:
        """A value, for a message."""
        value = self.values[index]
        return f"{value.name} ({_AGAIN[value.decision]}{f', layer {value.layer}' if value.layer else ''})"

    def takes_over(self, before: AuditedPlan) -> None:
        """The plan replaces another for the same steps: what differed under that one is known by its name."""
        names = {before.values[index].name for index in before.kept}
        self.kept = {index for index, value in enumerate(self.values) if value.name in names}
        self.is_alarmed = bool(names)


class SwapsWithoutPlan(AuditedPlan):
    """State: which of the values is compared that the next step swaps without a plan: one, by a checksum."""

    def __init__(self) -> None:
        self.kept, self.last_held, self.is_alarmed = set(), {}, False
        self._turn = self._count = self._most = 0

    def is_next(self) -> bool:
        """Whether the value that is now released is compared."""
        self._count += 1
        return self.is_alarmed or self._count - 1 == self._turn

    @property
    def latest(self) -> int:
        """The number in its step of the value that was released last."""
        return self._count - 1

    def step_ends(self) -> None:
        if self._count:
            self._most = max(self._most, self._count)
            self._turn, self._count, self.is_alarmed = (self._turn + 1) % self._most, 0, False

    def named(self, index: int) -> str:
        return f"value {index + 1} of those that a step without a plan swaps"


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
        self._chosen: dict[int, bool] = {}
        self._watched: list[Beside] = []
        self._compared, self._saves = set[int](), 0
        self.left_out = False
        """Whether the step leaves out layers of its plan."""
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
        self._plan = plan
        if plan.is_alarmed:
            plan.is_alarmed = False
            self.keeps_all = sum(plan.values[one].size_bytes for one in plan.released) <= self._free_bytes()
            self._chosen = dict.fromkeys(plan.released, self.keeps_all)
        else:
            self._allowed_s = MOST_SHARE * step_s
            most_scratch_bytes = math.inf if self._where.type == "cpu" else scratch_bytes
            self._chosen = plan.chosen(room_bytes, self._allowed_s * self._bytes_per_s, most_scratch_bytes)

    def step_ends(self) -> None:
        """Forgets what was watched; takes the results of a GPU's comparisons that are there."""
        if self._allowed_s and self._took_s:  # small values take their time whatever their bytes are
            self._bytes_per_s *= min(LARGEST_CHANGE, max(1 / LARGEST_CHANGE, self._allowed_s / self._took_s))
        self._allowed_s = self._took_s = 0.0
        if self._plan is not None:
            self._plan.ended(self._compared, set(self._chosen), left_out=self.left_out)
        self._unplanned.step_ends()
        for beside in self._watched:
            if beside.held_at is not None:
                beside.plan.last_held[beside.index] = beside.held_at
        self._watched, self._chosen, self._compared, self._saves, self.left_out = [], {}, set(), 0, False
        self._plan, self.compared, self.beside_bytes, self.keeps_all = None, 0, 0, False
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
        """Whether a value is kept, whatever the plan says, because it has differed. ``index``: its save point in a step
        that follows its plan. If it does not, or may leave out layers, all are kept that look the same: another save
        point may stand for that of the plan.
        """
        plan = self._plan
        if plan is not None and index is not None and (index in plan.kept or not plan.leaves_out):
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
            if not self.compares_unplanned:
                return
            plan, is_next, index = self._unplanned, self._unplanned.is_next(), self._unplanned.latest
            is_beside = False
        else:
            is_next, is_beside = index in self._chosen, self._chosen.pop(index, False)
        if is_next:
            self._watch(value, plan, index, is_beside=is_beside)

    def _watch(self, value: SavedValue, plan: AuditedPlan, index: int, *, is_beside: bool) -> None:
        begin_s = time.perf_counter()
        assert value.storage is not None
        beside = Beside(plan, index, value.storage, value.geometry or Geometry.of(value.probe), is_kept=is_beside)
        value.beside = beside
        self.beside_bytes += beside.size_bytes if beside.is_kept else 0
        if not beside.is_kept:
            if plan.last_held.get(index, 0) <= self._saves:  # else forward holds it until then, most likely
                beside.look_again()
            self._watched.append(beside)
            self._took_s += time.perf_counter() - begin_s

    def point(self, saves: int) -> None:
        """The step has come to that save point, or with the number of all to its first use."""
        self._saves = saves
        for beside in self._watched:
            if beside.weak() is None:
                continue
            beside.held_at = saves
            last = beside.plan.last_held.get(beside.index)
            if saves == last or (last is None and beside.looks < LOOKS):
                begin_s = time.perf_counter()
                beside.look_again()
                self._took_s += time.perf_counter() - begin_s

    def comes_back(self, value: SavedValue) -> None:
        """Its storage is there again. A value kept beside gets back what was kept."""
        beside, value.beside = value.beside, None
        if beside is None or value.storage is None:
            return
        if beside.kept is None and beside.checksum is None:  # forward has let go of it earlier than before
            beside.plan.last_held.pop(beside.index, None)
            return
        begin_s = time.perf_counter()
        self.compared += 1
        self._compared |= {beside.index} if beside.plan is self._plan else set()
        found = Comparison(beside, value.storage)
        if found.is_done:
            self._is_taken(found)
        else:
            self._pending.append(found)
        if beside.kept is not None and (not found.is_done or found.differs):
            value.storage = beside.kept
        self._took_s += time.perf_counter() - begin_s

    def _free_bytes(self) -> float:
        if self._where.type == "cuda":
            return SHARE_OF_FREE * torch.cuda.mem_get_info(self._where)[0]
        return SHARE_OF_FREE * available_bytes()


class Beside:
    """What is known of a value that the engine has released: the storage itself, or a checksum of it."""

    def __init__(
        self, plan: AuditedPlan, index: int, storage: torch.UntypedStorage, geometry: Geometry, *, is_kept: bool
    ) -> None:
        self.plan, self.index, self.size_bytes = plan, index, storage.nbytes()
        self.look: Look = geometry.dtype, geometry.shape
        self.part = None if covers(geometry, self.size_bytes) else geometry
        """What is compared: the tensor that was saved first. Forward may go on to write the rest of its storage, as an
        LSTM's cell writes the other gates. None for all of the storage.
        """
        self.is_kept = is_kept and (self.part is None or storage.device.type == "cpu")  # else it would take memory
        self.kept = storage if self.is_kept else None
        self.weak = weakref.ref(storage)
        self.looks = 0
        self.held_at: int | None = None
        """The last save point at which forward held it."""
        self.checksum: Any = None

    def look_again(self) -> None:
        """Takes the checksum of what the storage has now."""
        storage = self.weak()
        if storage is not None and storage.nbytes() == self.size_bytes:
            self.looks += 1
            self.checksum = checksum(storage, self.part)


class Comparison:
    """Of a value that has come back. On a GPU the result is read later, so that nothing waits."""

    def __init__(self, beside: Beside, storage: torch.UntypedStorage) -> None:
        self.plan, self.index, self.look, self.is_right = beside.plan, beside.index, beside.look, beside.is_kept
        if storage.device.type == "cpu":
            self._differs = _cpu_differs(beside, storage)
            self._done: torch.cuda.Event | None = None
            return
        with unseen_by_modes():
            if beside.kept is not None:
                found = _cuda_differs(beside.kept, storage)
            else:
                found = torch.ne(checksum(storage, beside.part), beside.checksum)
            self._result = small_buffer(1).view(torch.bool)
            self._result.copy_(found.view(1), non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(storage.device))

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
_AGAIN = {Decision.SWAP: "swapped", Decision.RECOMPUTE: "recomputed", Decision.KEEP: "kept"}


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


def checksum(storage: torch.UntypedStorage, part: Geometry | None = None) -> Any:
    """The sum of all words, modulo 2^64, and of the bytes behind the last; on the storage's device. Of a part of the
    storage the sum of its elements. On the CPU no memory of torch's is taken.
    """
    if part is not None and storage.device.type == "cpu":
        return int(np.add.reduce(_elements(storage, part), axis=None, dtype=np.uint64))
    if part is not None:
        with unseen_by_modes():
            return part.on(storage).view(_WORDS[part.dtype.itemsize]).sum(dtype=torch.int64)
    if storage.device.type == "cpu":
        memory, words = _memory(storage), storage.nbytes() // 8
        whole = int(np.add.reduce(np.frombuffer(memory, np.uint64, words))) if words else 0
        return whole, memory[words * 8 :]
    with unseen_by_modes():
        content = bytes_of(storage)
        end = content.numel() // 8 * 8
        return content[:end].view(torch.int64).sum() + content[end:].sum(dtype=torch.int64)


_C_LIBRARY = ctypes.CDLL(None)
_C_LIBRARY.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _cpu_differs(beside: Beside, storage: torch.UntypedStorage) -> bool:
    if beside.kept is None:
        return bool(checksum(storage, beside.part) != beside.checksum)
    if beside.kept.nbytes() != storage.nbytes():
        return True
    if beside.part is not None:
        return not np.array_equal(_elements(beside.kept, beside.part), _elements(storage, beside.part))
    return bool(_C_LIBRARY.memcmp(beside.kept.data_ptr(), storage.data_ptr(), storage.nbytes()))


def _cuda_differs(kept: torch.UntypedStorage, storage: torch.UntypedStorage) -> torch.Tensor:
    """In pieces, because each takes memory."""
    left, right = bytes_of(kept), bytes_of(storage)
    pieces: Iterable[int] = range(0, left.numel(), PIECE_BYTES)
    found = torch.zeros((), dtype=torch.bool, device=storage.device)
    for at in pieces:
        found.logical_or_(torch.ne(left[at : at + PIECE_BYTES], right[at : at + PIECE_BYTES]).any())
    return found
