"""Verify: a step policy that tries each replay alone and compares it bitwise with a copy of the saved value.

HostStore: storages in a separate host tier, as copies for the comparison. An operator may write a parameter, a buffer
or an input without declaring it (running statistics, a counter), and would do so again with each replay; neither
autograd nor the dispatcher shows it. So the bytes are kept, compared and, if they differ, restored.

LateWrites: saved values and sources that a step writes after they were saved, past the dispatcher. Autograd would use
what was written, and a copy on the host has what was saved. Neither a version counter nor a recorded op shows such a
write, for example through ``numpy()``. So contents are summed when they are saved, and once more when no other code can
write them any longer, or when backward first uses them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from poochplan.errors import PoochError
from poochplan.formats.plan import Decision, Instructions
from poochplan.formats.profile_parts import host_aligned
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.runtime.devices.opening import open_device
from poochplan.runtime.devices.transfers import Copy, copy_in, copy_out
from poochplan.runtime.engine.mechanism import Mechanism
from poochplan.runtime.engine.saved_value import SavedHandle, SavedValue
from poochplan.runtime.replays.compiled_tape import unrecorded
from poochplan.runtime.replays.recipes import WRITTEN_SINCE
from poochplan.runtime.replays.replay import NotReplayable, Parts, StorageRecord
from poochplan.runtime.step_policies.follow import Follow, IndexedPlan
from poochplan.runtime.step_policies.step_policy import Actions, Diverged, StepPolicy, SwapEach, no_room
from poochplan.tensors.storages import bytes_of, memory_of
from poochplan.tensors.storages import parts_of as tensor_parts
from poochplan.torch_private.tensor_internals import holders_of, without_modes

PIECE_BYTES = 65536
"""Contents are summed and compared in pieces of at least this many bytes; a multiple of 8."""
MOST_PIECES = 32
"""Of a value on a GPU, where each piece is a few launches, whatever it has to do."""
Copied = Callable[[int, int], torch.UntypedStorage]
"""Returns that many bytes of a copy, from an offset on: a storage for the caller to keep."""


class Verify(Follow):
    """Follows instructions that recompute values. It keeps a copy of each, which is compared with its replay.

    No replay changes the step: its changes are undone, and if it raises the value's copy takes its place.
    :meth:`rebuild` must be the engine's.

    ``store``: where the copies are kept; None for memory.
    """

    def __init__(self, instructions: Instructions, model: torch.nn.Module, store: HostStore | None = None) -> None:
        super().__init__(IndexedPlan.of(instructions), SwapEach())
        self.refused: dict[int, str] = {}
        """Why values could not be replayed, by save point."""
        self.differing: set[int] = set()
        """Save points of values whose replay gave other bits."""
        self.verified: set[int] = set()
        """Save points of values whose replay gave the same bits."""
        self.late_writes = LateWrites()
        self._named = model
        self._store = store
        self._changed: list[StorageRecord] = []
        """Earlier memory that the running replay has changed."""
        self._copies: dict[int, Copied] = {}

    # -- the step policy --------------------------------------------------------------------------------------

    def followed(self) -> None:
        return None  # it looks at each save and use

    def at_save(self, value: SavedValue, index: int | None) -> Actions:
        if index is not None:
            self.late_writes.saved(index, value)
        return super().at_save(value, index)

    def at_use(self, number: int, handle: SavedHandle, saves: int) -> Actions:
        if handle.value is not None and handle.value.index is not None:
            self.late_writes.used(handle.value.index)
        return super().at_use(number, handle, saves)

    def before_drop(self, value: SavedValue) -> None:
        assert value.storage is not None
        assert value.index is not None
        with without_modes():  # otherwise recording would see the storage through the tensors that copy it
            self._copies[value.index] = self._copied(value.storage)

    def not_replayable(self, value: SavedValue, reason: NotReplayable) -> Actions:
        assert value.index is not None
        self.refused[value.index] = self._why(reason)
        return super().not_replayable(value, reason)

    def diverged(self, reason: Diverged) -> tuple[StepPolicy, Actions]:
        self.late_writes.forget()
        return super().diverged(reason)

    def _copied(self, storage: torch.UntypedStorage) -> Copied:
        """A function that returns the present contents."""
        if self._store is None:
            copy = storage.clone()
            whole = bytes_of(copy)
            return lambda start, size: (
                copy if size == copy.nbytes() else whole[start : start + size].clone().untyped_storage()
            )
        store, offset = self._store, self._store.put(storage)
        return lambda start, size: store.get(offset + start, size)

    # -- replays ----------------------------------------------------------------------------------------------

    def rebuild(self, value: SavedValue, mechanism: Mechanism) -> None:
        """Rebuilds one value at a time, so that a failure belongs to one replay."""
        for one in _waiting_for(value):
            if one.waits_for_replay:
                self._rebuild_one(one, mechanism)

    def _rebuild_one(self, value: SavedValue, mechanism: Mechanism) -> None:
        assert value.recipe is not None
        assert value.index is not None
        sources = [source for source in value.recipe.values if isinstance(source, SavedValue)]
        away = [source for source in sources if source.storage is None]
        self._changed = []
        try:
            back = mechanism.run_replay(value, self._unchanged)
        except (PoochError, MemoryError, torch.OutOfMemoryError):
            raise  # an error of this machine's memory or disk, not of the replay
        except Exception as error:
            self.refused[value.index] = self._why(error)
            value.came_back(self._copies.pop(value.index)(0, value.size_bytes))
            value.home = mechanism.device.compute
            back = [value]
        if self._changed:
            names = ", ".join(map(self._name, self._changed))
            self.refused[value.index] = f"replaying it would write {names} once more, which no operator declares"
        for found in back:
            if found.storage is not None and found.index is not None and found.index in self._copies:
                self._compare(found.index, found.storage)
        for source in away:
            if source.decision is Decision.SWAP:
                mechanism.release(source)  # its own use may be far

    @contextlib.contextmanager
    def _unchanged(self, parts: Parts) -> Iterator[None]:
        """A block behind which these parts are as before it."""
        # Copies of the bytes that the ops see alone, the weights of a layer or two: many tensors may share one storage,
        # as weights mapped from a file do.
        before = [(record, part, part.clone()) for record, part in parts]
        try:
            yield
        finally:
            changed = [(record, part, copy) for record, part, copy in before if not torch.equal(part, copy)]
            for _, part, copy in changed:
                part.copy_(copy)
            self._changed = [record for record, _, _ in changed]

    def _compare(self, index: int, found: torch.UntypedStorage) -> None:
        copy, size_bytes = self._copies.pop(index), found.nbytes()
        differs: bool | torch.Tensor = False
        # Piece by piece: a step that swaps everything may have no room for one more value. A GPU is asked once.
        piece_bytes = max(PIECE_BYTES, -(-size_bytes // 16 // PIECE_BYTES) * PIECE_BYTES)
        for start in range(0, size_bytes, piece_bytes):
            part = bytes_of(found)[start : start + piece_bytes]
            wanted = bytes_of(copy(start, len(part)))
            is_cpu = part.device.type == "cpu"
            differs = differs | (not torch.equal(wanted, part) if is_cpu else (wanted != part).any())
            if differs is not False:
                part.copy_(wanted)  # otherwise replays that start from it would differ too
        if index not in self.refused:
            (self.differing if differs else self.verified).add(index)

    # -- in words ---------------------------------------------------------------------------------------------

    def _why(self, error: BaseException) -> str:
        """Why a replay raised, or a recipe could not be made."""
        reason = error if isinstance(error, NotReplayable) else error.__context__
        if not isinstance(reason, NotReplayable):
            return f"its replay raised {type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
        if str(reason) != WRITTEN_SINCE or reason.record is None:
            return str(reason)
        return f"replaying it needs {self._name(reason.record)} as it was, and the step writes that after it was read"

    def _name(self, record: StorageRecord) -> str:
        """The model's name for a storage, for the reader of a reason."""
        storage = record.storage()
        for name, tensor in (*self._named.named_parameters(), *self._named.named_buffers()):
            if any(memory_of(part) is storage for part in tensor_parts(tensor)):
                return name
        return "an activation" if record.is_born else "an input of the step"


def _waiting_for(value: SavedValue) -> list[SavedValue]:
    """The values from which it is replayed that wait for a replay too, each after those that it needs; itself last.

    It does not recurse: in a residual stream there are as many as the network has layers.
    """
    order: dict[SavedValue, None] = {}
    pending = [(value, False)]
    while pending:
        one, its_own_are_done = pending.pop()
        if one in order or one.recipe is None or not one.waits_for_replay:
            continue
        if its_own_are_done:
            order[one] = None
            continue
        pending.append((one, True))
        pending += [(source, False) for source in one.recipe.values if isinstance(source, SavedValue)]
    return list(order)


# -- copies ----------------------------------------------------------------------------------------------------------


class HostStore:
    """Contents of storages in a separate host tier, one after another."""

    def __init__(self, where: torch.device, spill_dir: str | Path | None) -> None:
        self.device: ComputeDevice = open_device(where, spill_dir)
        self._end_bytes = 0

    def put(self, storage: torch.UntypedStorage) -> int:
        """Copies the storage there, waits, and returns its offset. Raises ``SpillError`` if it cannot be written."""
        offset = self._end_bytes
        self._end_bytes += host_aligned(storage.nbytes())
        _end(copy_out(self.device, storage, offset), "written")
        return offset

    def get(self, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """A new storage of ``size_bytes`` with the contents stored at ``offset``; raises ``SpillError``."""
        storage = self.device.allocate(size_bytes)
        _end(copy_in(self.device, storage, offset), "read back")
        return storage

    def close(self) -> None:
        self.device.close()


def _end(copy: Copy, what: str) -> None:
    copy.wait()
    if copy.error is not None:
        raise no_room(copy.error, what) from copy.error


# -- late writes ------------------------------------------------------------------------------------------------------


class LateWrites:
    """State: storages that other code may still write before their first use, each with its checksum. One that only
    this class holds is let go at the next save or use. So a step takes at most one value and its source more.
    """

    def __init__(self) -> None:
        self.values: set[int] = set()
        """Save points of values that were written after they were saved."""
        self.copies: set[int] = set()
        """Save points of copies whose source was written after it was read."""
        self._held: dict[int, list[_Held]] = {}
        """By save point: the value, and the source if it is a copy."""

    def saved(self, index: int, value: SavedValue) -> None:
        """A value is saved at this save point; its storage is still there."""
        self._let_go()
        assert value.storage is not None
        copy_sum = checksum(value.storage)
        held = self._held[index] = [_Held(value.storage, copy_sum, self.values)]
        read = value.record.source()
        source = None if read is None else read.record.storage()
        if source is None or source.nbytes() >= value.size_bytes:
            return
        with without_modes():
            again = value.record.made_again()
        if checksum(again) == copy_sum:
            held.append(_Held(source, checksum(source), self.copies))
        else:
            self.copies.add(index)

    def used(self, index: int) -> None:
        """Backward is about to use the value of this save point. Its node may write it from then on."""
        for one in self._held.pop(index, []):
            one.compare(index)
        self._let_go()

    def forget(self) -> None:
        """The step is over, or says nothing any more."""
        self._held.clear()

    def _let_go(self) -> None:
        for index, held in list(self._held.items()):
            for one in [one for one in held if holders_of(one.storage) == 1]:
                one.compare(index)
                held.remove(one)
            if not held:
                del self._held[index]


class _Held(NamedTuple):
    storage: torch.UntypedStorage
    checksum: int
    written: set[int]
    """Gets the save point if the storage was written since."""

    def compare(self, index: int) -> None:
        if checksum(self.storage) != self.checksum:
            self.written.add(index)


def checksum(storage: torch.UntypedStorage) -> int:
    """A number of the contents, in which each eight bytes have another weight in their piece, and each piece has. It is
    added up on the device, whose work is waited for once.
    """
    with without_modes(), unrecorded(), torch.no_grad():
        whole, piece_bytes = bytes_of(storage), PIECE_BYTES
        if storage.device.type != "cpu":
            piece_bytes = max(PIECE_BYTES, 8 * -(-whole.numel() // (8 * MOST_PIECES)))
        weights = torch.arange(1, piece_bytes // 4, 2, device=storage.device)
        total = torch.zeros((), dtype=torch.int64, device=storage.device)
        for piece in whole.split(piece_bytes):
            words = piece[: len(piece) // 8 * 8].view(torch.int64)
            total.mul_(3).add_((words * weights[: len(words)]).sum())
        rest = whole[len(whole) // 8 * 8 :]
        return int(total.add_((rest * weights[: len(rest)]).sum()))
