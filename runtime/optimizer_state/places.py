"""Where the state of optimizers is: on the device, or on its place in the host tier.

A state tensor stays the object that it is. While it is away, its memory is its place in the host tier. So
``state_dict()``, a printout or an average reads what it would read without a session, and whoever writes to it writes
what the next step reads.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch

from poochplan.errors import is_out_of_memory
from poochplan.runtime.devices.transfers import Copy, copy_in, copy_out
from poochplan.runtime.engine.engine import Engine
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.tensor_internals import holders_of, unseen_by_modes
from poochplan.units import format_bytes

NO_ROOM = (
    "there is no room for a tensor of optimizer state on the host ({}): such state stays on the device, and steps may "
    "exceed the budget; free disk space or host memory, or name another spill_dir"
)
STAYS_AWAY = (
    "the device has no room for {} of optimizer state, which stays in host memory, with the right values; once there "
    "is room, optimizer.load_state_dict(optimizer.state_dict()) moves it"
)


class _Place(weakref.ref[torch.Tensor]):
    """The place of a state tensor; a weak reference to the tensor."""

    offset: int
    """Of its bytes in the host tier."""
    home: torch.Tensor
    """A tensor like it on these bytes."""
    holders: int
    """How many hold the bytes while no state tensor does."""
    coming: tuple[torch.Tensor, Copy] | None = None
    """A tensor like it on the device, and the copy that fills that."""
    going: Copy | None = None
    is_refused = False
    """Whether the host tier had no room for it, or could not be written."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is away."""
        return not self.is_refused and tensor.data_ptr() == self.home.data_ptr() and tensor.device == self.home.device


class StatePlaces:
    """State: the place of each state tensor that has been away. ``warn`` gets what the user is to know, in one line."""

    def __init__(self, engine: Engine, warn: Callable[[str], None]) -> None:
        self._engine, self._warn = engine, warn
        self._places: dict[int, _Place] = {}
        """By identity of the tensor."""
        self._died: deque[_Place] = deque()
        self._owner = os.getpid()
        self._is_told = False
        self.out_bytes = self.in_bytes = 0

    @property
    def is_copied(self) -> bool:
        """Whether this is a child process, in which nothing copies."""
        return os.getpid() != self._owner

    def is_away(self, tensor: torch.Tensor) -> bool:
        place = self._place_of(tensor)
        return place is not None and place.has(tensor)

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Queues the copies of those that are away into new memory of the device."""
        device = self._engine.device
        for tensor in tensors:
            place = self._place_of(tensor)
            if place is None or place.coming is not None or not place.has(tensor):
                continue
            storage = device.allocate(_bytes_in(tensor))
            like = Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), 0).on(storage)
            place.coming = like, copy_in(device, storage, place.offset)
            self.in_bytes += storage.nbytes()

    def arrive(self, tensors: Iterable[torch.Tensor]) -> None:
        """The compute stream waits for the copies of those that were fetched, which are then on the device."""
        for tensor in tensors:
            place = self._place_of(tensor)
            if place is None or place.coming is None:
                continue
            (like, copy), place.coming = place.coming, None
            copy.wait()
            if copy.error is not None:
                like.copy_(place.home)
            tensor.data = like

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Queues the copies of those that are on the device to their places, behind what writes them."""
        device = self._engine.device
        for tensor in tensors:
            if tensor.device.type != device.kind:  # away already, or of parameters that are on the host themselves
                continue
            place = self._place_of(tensor) or self._new_place(tensor)
            if place.going is None and not place.is_refused and not place.has(tensor):
                storage = tensor.untyped_storage()
                place.going = copy_out(device, storage, place.offset)
                self.out_bytes += storage.nbytes()

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """The compute stream waits for the copies of those that were sent, which then hold nothing of the device."""
        for tensor in tensors:
            place = self._place_of(tensor)
            if place is None or place.going is None:
                continue
            copy, place.going = place.going, None
            copy.wait()
            if copy.error is None:
                tensor.data = place.home
            else:
                self._refuse(place, copy.error)

    def finish(self) -> None:
        """Blocks the thread until all that was queued has ended: what is away can be read."""
        self._engine.device.synchronize()

    def come_back(self, tensors: Iterable[torch.Tensor]) -> int:
        """Those that are away are on the device again, one after the other. Returns the bytes for which it has no room:
        they stay where they are. In a child process they come into its own memory.
        """
        left_bytes = 0
        for tensor in tensors:
            place = self._place_of(tensor)
            if place is None:
                continue
            if self.is_copied:
                tensor.data = tensor.clone() if place.has(tensor) else tensor
                continue
            try:
                self.settle([tensor])
                self.fetch([tensor])
                self.arrive([tensor])
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                left_bytes += _bytes_in(tensor)
        return left_bytes

    def close(self) -> None:
        """The session ends: all state is on the device, or a line says for how much there was no room."""
        with unseen_by_modes():
            tensors = [tensor for place in self._places.values() if (tensor := place()) is not None]
            left_bytes = self.come_back(tensors)
        if left_bytes:
            self._warn(STAYS_AWAY.format(format_bytes(left_bytes)))
        self._places.clear()

    def _place_of(self, tensor: torch.Tensor) -> _Place | None:
        place = self._places.get(id(tensor))
        return place if place is not None and place() is tensor else None

    def _new_place(self, tensor: torch.Tensor) -> _Place:
        self._free_the_dead()
        place = _Place(tensor, self._died.append)
        self._places[id(tensor)] = place
        size_bytes = _bytes_in(tensor)
        try:
            place.offset = self._held(size_bytes)
            view = self._engine.device.host_view(size_bytes, place.offset)
            place.home = view.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            place.holders = holders_of(view.untyped_storage())
        except (OSError, ValueError) as error:  # a mapping begins at a multiple of the system's pages
            self._refuse(place, error)
        return place

    def _held(self, size_bytes: int) -> int:
        engine = self._engine
        with engine.lock:
            first = engine.host.hold(size_bytes)
            try:
                engine.device.reserve_host(size_bytes, first, lasting=True)
            except OSError:
                engine.host.let_go(first)
                raise
        return first

    def _refuse(self, place: _Place, error: Exception) -> None:
        place.is_refused = True
        if not self._is_told:
            self._is_told = True
            self._warn(NO_ROOM.format(getattr(error, "strerror", None) or os.strerror(errno.EIO)))

    def _free_the_dead(self) -> None:
        """The places of tensors that are gone are free, unless others hold tensors on the same bytes."""
        while self._died:
            place = self._died.popleft()
            self._places = {key: one for key, one in self._places.items() if one is not place}
            if not place.is_refused and holders_of(place.home.untyped_storage()) <= place.holders:
                with self._engine.lock:
                    self._engine.host.let_go(place.offset)


def _bytes_in(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
