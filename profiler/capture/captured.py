"""The facts that the capture records: ops, values with their storages, and autograd's hold on values.

A value has its own storage. If it is saved it also has a copy, on which backward runs. The death of its own storage
shows when forward releases it; the end of the last handle and of the last copy shows when autograd does.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from poochplan.formats.profile import OpBlock, Phase
from poochplan.tensors.storages import storage_key
from poochplan.torch_private.tensor_internals import storage_identity

Shapes = tuple[Any, ...]


def shapes_of(outputs: Any) -> Shapes:
    """Shape of each tensor that an operator returns, in its own nesting; those of nested tensors are left out."""
    if isinstance(outputs, torch.Tensor):
        return () if outputs.is_nested else tuple(outputs.shape)
    return tuple(map(shapes_of, outputs)) if isinstance(outputs, (tuple, list)) else ()


@dataclass(eq=False, slots=True)
class CapturedOp:
    """An op that will become a ``formats.profile.Op``."""

    name: str
    layer: str
    phase: Phase
    duration_s: float = 0.0
    workspace_bytes: int = 0
    blocks: tuple[OpBlock, ...] = ()
    carried: list[tuple[int, CapturedOp]] = field(default_factory=list)
    """For a part of a compiled backward: bytes of each block that it makes, and the later part that releases it."""
    shapes: Shapes = ()
    """Shapes of its results."""
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    random: bool = False
    early: bool = False
    """Whether it runs before a session records, so that it cannot be run again."""
    opaque: bool = False
    uninitialised: bool = False
    """Whether its output storages have not been written yet."""
    partly_unwritten: list[int] = field(default_factory=list)
    """Those of its outputs that it does not write completely."""
    overwrites: int | None = None
    """The value whose every byte it writes without reading one."""
    node: int = -1
    """The number of autograd's node that runs it; -1 outside backward."""
    adds_to: int = -1
    """The gradient of an earlier node that autograd has added to; -1 if it is no such sum."""


@dataclass(eq=False, slots=True)
class CapturedValue:
    """One storage. Ticks are None while it lives."""

    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    layer: str
    born: int
    key: int
    died: int | None = None
    """Tick of forward death."""
    let_go: int | None = None
    """Tick at which the last handle died; None while one lives, or if there was none."""
    packed_version: int | None = None
    pinned_because: str = ""
    born_tick: int | None = None
    """Tick at which it is created, if no op creates it."""
    stretch_of: int = -1
    """The value of the first stretch of a storage that releases its memory and takes it again."""


class Lifetimes:
    """State: all values so far, and which of their storages and handles are alive.

    Parameters
    ----------
    last_tick: returns the last tick so far.
    gone: called with each value that nothing holds any more.
    """

    def __init__(self, last_tick: Callable[[], int], gone: Callable[[CapturedValue], None]) -> None:
        self.values: list[CapturedValue] = []
        self._last_tick = last_tick
        self._tell_gone = gone
        self._by_key: dict[int, int] = {}
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._copy_deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._stand_ins: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.UntypedStorage]] = {}
        """Each stand-in, with the storage that it stands for and that lives as long."""
        self._live_copies: Counter[int] = Counter()
        """Storages of copies, by value."""
        self._live_handles: dict[int, int] = {}
        self._heirs: dict[int, Callable[[], None]] = {}
        """Functions of a later step, by value: called once nothing holds the value any more."""
        self._given_up: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Storages that have had no memory in this step, by identity, and the values of their first stretches."""

    def find(self, tensor: torch.Tensor) -> int:
        """The value in the tensor's storage; -1 if there is none."""
        return self._by_key.get(storage_key(tensor), -1)

    def is_known(self, storage: torch.UntypedStorage) -> bool:
        return storage_identity(storage) in self._by_key

    def add(self, tensor: torch.Tensor, layer: str, born: int) -> int:
        """The number of a new value, which is in the tensor's storage."""
        number = len(self.values)
        storage, dtype = tensor.untyped_storage(), str(tensor.dtype).removeprefix("torch.")
        value = CapturedValue(storage.nbytes(), dtype, tuple(tensor.shape), layer, born, storage_key(tensor))
        self.values.append(value)
        self._knows(number, storage)
        return number

    def _knows(self, number: int, storage: torch.UntypedStorage) -> None:
        self._by_key[self.values[number].key] = number
        self._deaths[number] = weakref.ref(storage, lambda _: self._died(number))

    def gives_up(self, storage: torch.UntypedStorage) -> None:
        """The storage has released its memory and lives on. Its value ends."""
        key = storage_identity(storage)
        number = self._by_key.get(key)
        if number is None or self.values[number].key != key:
            return
        value = self.values[number]
        if value.stretch_of < 0:
            value.stretch_of = number
        self._given_up[key] = weakref.ref(storage), value.stretch_of
        self._died(number)

    def takes_again(self, tensor: torch.Tensor, layer: str, born: int) -> None:
        """The tensor's storage has memory again: another stretch of it begins."""
        number = self.add(tensor, layer, born)
        value = self.values[number]
        before, first = self._given_up.get(value.key, (None, number))
        is_same = before is not None and before() is tensor.untyped_storage()
        value.stretch_of, value.born_tick = first if is_same else number, self._last_tick() + 1

    def storage_of(self, number: int) -> torch.UntypedStorage | None:
        reference = self._deaths.get(number)
        return None if reference is None else reference()

    def stands_in(self, storage: torch.UntypedStorage, own: torch.UntypedStorage) -> None:
        """The value in its ``own`` storage continues in another one."""
        key = storage_identity(storage)
        self._by_key[key] = self._by_key[storage_identity(own)]
        self._stand_ins[key] = weakref.ref(storage, lambda _: self._stand_in_died(key)), own

    def held(self) -> set[int]:
        """Values made in the step that are still held: by other code, or by a handle of autograd."""
        saved = {number for number, handles in self._live_handles.items() if handles}
        return {number for number in self._deaths.keys() | saved if self.values[number].born >= 0}

    def inherit(self, earlier: Lifetimes) -> Iterator[torch.UntypedStorage]:
        """What an earlier step has made and something still holds was there before this step: each is a value until
        nothing holds it any more. Yields the storages of those that have one.
        """
        for number in sorted(earlier.held()):
            storage, old = earlier.storage_of(number), earlier.values[number]
            if storage is not None and self.is_known(storage):
                continue
            mine = self.outlives(old.size_bytes, storage)
            if storage is not None:
                yield storage
            if earlier.is_saved(number):
                self.holds(mine)
                earlier.passes_to(number, partial(self.let_go, mine))

    def passes_to(self, number: int, heir: Callable[[], None]) -> None:
        """A later step's function, called once nothing holds the value any more."""
        self._heirs[number] = heir

    def outlives(self, size_bytes: int, storage: torch.UntypedStorage | None) -> int:
        """The number of a value of an earlier step; without a storage, only autograd holds it."""
        number = len(self.values)
        key = 0 if storage is None else storage_identity(storage)
        value = CapturedValue(size_bytes, "uint8", (size_bytes,), "", -1, key, died=None if storage is not None else 0)
        self.values.append(value)
        if storage is not None:
            self._knows(number, storage)
        return number

    def is_saved(self, number: int) -> bool:
        """Whether autograd has held it, in this step or since an earlier one."""
        return number in self._live_handles

    def holds(self, number: int) -> None:
        """Adds a holder of the copy of a saved value: a handle, or an object that the handles share."""
        self._live_handles[number] = self._live_handles.get(number, 0) + 1
        self.values[number].let_go = None

    def let_go(self, number: int) -> None:
        self._live_handles[number] -= 1
        self._perhaps_let_go(number)

    def is_copied_to(self, storage: torch.UntypedStorage, number: int) -> None:
        """The storage holds the copy of a saved value: ops that read it read the value."""
        key = storage_identity(storage)
        if key not in self._copy_deaths:
            self._by_key[key] = number
            self._live_copies[number] += 1
            self._copy_deaths[key] = weakref.ref(storage, lambda _: self._copy_died(key, number))

    def _died(self, number: int) -> None:
        value = self.values[number]
        value.died = self._last_tick()
        self._deaths.pop(number, None)
        if self._by_key.get(value.key) == number:
            del self._by_key[value.key]
        self._perhaps_gone(number)

    def _stand_in_died(self, key: int) -> None:
        self._by_key.pop(key, None)
        self._stand_ins.pop(key, None)

    def _copy_died(self, key: int, number: int) -> None:
        self._by_key.pop(key, None)
        self._copy_deaths.pop(key, None)
        self._live_copies[number] -= 1
        self._perhaps_let_go(number)

    def _perhaps_let_go(self, number: int) -> None:
        """Backward may hold an unpacked tensor longer than the handle, as compiled backwards do."""
        if not self._live_handles[number] and not self._live_copies[number]:
            self.values[number].let_go = self._last_tick()
            self._perhaps_gone(number)

    def _perhaps_gone(self, number: int) -> None:
        if number not in self._deaths and not self._live_handles.get(number) and not self._live_copies[number]:
            self._tell_gone(self.values[number])
            self._heirs.pop(number, lambda: None)()
