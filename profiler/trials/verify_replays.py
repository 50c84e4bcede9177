"""Verify: a step policy that tries each replay alone and compares it bitwise with a copy of the saved value."""

from __future__ import annotations

from collections.abc import Callable

import torch

from poochplan.errors import PoochError
from poochplan.formats.plan import Decision, Instructions
from poochplan.runtime.engine.mechanism import Mechanism
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays.recorded import RecordedOp, StorageRecord
from poochplan.runtime.replays.replay import WRITTEN_SINCE, Leaves, NotReplayable, run_ops
from poochplan.runtime.step_policies.follow import Course, Follow
from poochplan.runtime.step_policies.step_policy import Actions, Diverged, StepPolicy, SwapEach
from poochplan.tensors.storages import memory_of
from poochplan.tensors.storages import parts_of as tensor_parts
from poochplan.torch_private.tensor_internals import without_modes

from .host_store import HostStore, Untouched, bytes_of

PIECE_BYTES = 65536
Copied = Callable[[int, int], torch.UntypedStorage]
"""Returns that many bytes of a copy, from an offset on: a storage for the caller to keep."""


class Verify(Follow):
    """Follows instructions that recompute values. It keeps a copy of each, which is compared when its replay has
    brought the value back.

    No replay changes the step: its changes are undone, and if it raises the value's copy takes its place.
    :meth:`rebuild` must be the engine's.

    ``store``: where the copies are kept; None for memory.
    """

    def __init__(self, instructions: Instructions, model: torch.nn.Module, store: HostStore | None = None) -> None:
        super().__init__(Course.of(instructions), SwapEach())
        self.refused: dict[int, str] = {}
        """Why values could not be replayed, by save point."""
        self.differing: set[int] = set()
        """Save points of values whose replay gave other bits."""
        self.verified: set[int] = set()
        """Save points of values whose replay gave the same bits."""
        self.divergence = ""
        """Where and how the step diverged from its own profile; empty while it has not."""
        self._model = model
        self._store = store
        self._changed: list[StorageRecord] = []
        """Earlier memory that the running replay has changed."""
        self._copies: dict[int, Copied] = {}

    # -- the step policy --------------------------------------------------------------------------------------

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
        self.divergence = reason.reason
        return super().diverged(reason)

    def _copied(self, storage: torch.UntypedStorage) -> Copied:
        """A function that returns the present contents."""
        if self._store is None:
            copy = storage.clone()
            return lambda start, size: copy if size == copy.nbytes() else _part(copy, start, size)
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
            back = mechanism.replay(value, self._run)
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
                mechanism.give_up(source)  # its own use may be far

    def _run(
        self, ops: list[RecordedOp], there: Leaves, keep: set[StorageRecord], device_type: str
    ) -> dict[StorageRecord, torch.UntypedStorage]:
        untouched = Untouched(ops, there)
        try:
            return run_ops(ops, there, keep, device_type)
        finally:
            self._changed = untouched.restore()

    def _compare(self, index: int, found: torch.UntypedStorage) -> None:
        copy, size_bytes, same = self._copies.pop(index), found.nbytes(), True
        # Piece by piece: a step that swaps everything may have no room for one more value.
        piece_bytes = max(PIECE_BYTES, -(-size_bytes // 16 // PIECE_BYTES) * PIECE_BYTES)
        for start in range(0, size_bytes, piece_bytes):
            part = bytes_of(found)[start : start + piece_bytes]
            wanted = bytes_of(copy(start, len(part)))
            if not torch.equal(wanted, part):
                same = False
                part.copy_(wanted)  # otherwise replays that start from it would differ too
        if index not in self.refused:
            (self.verified if same else self.differing).add(index)

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
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if any(memory_of(part) is storage for part in tensor_parts(tensor)):
                return name
        return "an input of the step" if record.birth is None else "an activation"


def _part(storage: torch.UntypedStorage, start: int, size_bytes: int) -> torch.UntypedStorage:
    return bytes_of(storage)[start : start + size_bytes].clone().untyped_storage()


def _waiting_for(value: SavedValue) -> list[SavedValue]:
    """The saved values from which it is replayed that wait for a replay too, each after those that it needs; itself
    last.

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
