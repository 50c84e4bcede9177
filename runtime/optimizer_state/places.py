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
from poochplan.runtime.metering.census import leave_out
from poochplan.tensors.optimizers import goes_away, is_away, is_back
from poochplan.tensors.storages import Geometry
from poochplan.torch_private.tensor_internals import holders_of, unseen_by_modes, version_of
from poochplan.units import format_bytes

NO_ROOM = (
    "there is no room for a tensor of optimizer state on the host ({}): such state stays on the device, and steps may "
    "exceed the budget; free disk space or host memory, or name another spill_dir"
)
NO_LONGER_SHARED = (
    "something has held {} of optimizer state since it was in host memory, where it stays as it is now: training no "
    "longer changes it; take it from optimizer.state again"
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
    geometry: Geometry
    """Of the tensor."""
    coming: tuple[torch.Tensor, Copy, int] | None = None
    """A tensor like it on the device, the copy that fills that, and the tensor's version then."""
    going: tuple[Copy, int] | None = None
    """The copy, and the tensor's version when it was queued."""
    is_refused = False
    """Whether the host tier had no room for it, or could not be written."""

    def is_shared(self, tensor: torch.Tensor | None) -> bool:
        """Whether others than the tensor hold the bytes: views that were made while it was away."""
        own = tensor is not None and is_away(tensor)
        return holders_of(self.home.untyped_storage()) > self.holders + own


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

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Queues the copies of those that are away into new memory of the device."""
        device = self._engine.device
        for tensor in tensors:
            place = self._place_of(tensor)
            if place is None or place.coming is not None or not is_away(tensor):
                continue
            storage = device.allocate(_bytes_in(tensor))
            like = Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), 0).on(storage)
            place.coming = like, copy_in(device, storage, place.offset), version_of(tensor)
            self.in_bytes += storage.nbytes()

    def arrive(self, tensors: Iterable[torch.Tensor]) -> None:
        """The compute stream waits for the copies of those that were fetched, which are then on the device."""
        for tensor in tensors:
            place = self._place_of(tensor)
            if place is None or place.coming is None:
                continue
            (like, copy, version), place.coming = place.coming, None
            copy.wait()
            if copy.error is not None or version_of(tensor) != version:  # it was written meanwhile
                like.copy_(place.home)
            tensor.data = like
            is_back(tensor)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Queues the copies of those that are on the device to their places, behind what writes them."""
        device = self._engine.device
        for tensor in tensors:
            if tensor.device.type != device.kind:  # away already, or of parameters that are on the host themselves
                continue
            place = self._place_of(tensor) or self._new_place(tensor)
            if place.going is None and not place.is_refused and not is_away(tensor):
                storage = tensor.untyped_storage()
                place.going = copy_out(device, storage, place.offset), version_of(tensor)
                self.out_bytes += storage.nbytes()

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """The compute stream waits for the copies of those that were sent, which then hold nothing of the device; but
        one that was written meanwhile stays there.
        """
        for tensor in tensors:
            place = self._place_of(tensor)
            if place is None or place.going is None:
                continue
            (copy, version), place.going = place.going, None
            copy.wait()
            if copy.error is not None:
                self._refuse(place, copy.error)
            elif version_of(tensor) == version:
                tensor.data = place.home
                goes_away(tensor)

    def finish(self) -> None:
        """Blocks the thread until all that was queued has ended: what is away can be read."""
        self._engine.device.synchronize()

    def come_back(self, tensors: Iterable[torch.Tensor]) -> int:
        """Those that are away are on the device again, one after the other. Returns the bytes for which it has no room:
        they stay where they are. So do those that others see too, if the device is the host. In a child process they
        come into its own memory.
        """
        left_bytes, is_host = 0, self._engine.device.where.type == "cpu"
        for tensor in tensors:
            place = self._place_of(tensor)
            if place is None:
                continue
            if self.is_copied:
                if is_host and is_away(tensor):  # other pinned memory than the parent's there is none
                    tensor.data = tensor.clone()
                    is_back(tensor)
                continue
            if is_host and is_away(tensor) and place.is_shared(tensor):
                continue
            place.going = None  # it is there still, and a copy that dies is waited for
            try:
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
            alive = [(place, tensor) for place in self._places.values() if (tensor := place()) is not None]
            left_bytes = self.come_back([tensor for _, tensor in alive])
            shared_bytes = sum(
                _bytes_in(tensor)
                for place, tensor in alive
                if not place.is_refused and not is_away(tensor) and place.is_shared(tensor)
            )
        if left_bytes:
            self._warn(STAYS_AWAY.format(format_bytes(left_bytes)))
        if shared_bytes and not self.is_copied:
            self._warn(NO_LONGER_SHARED.format(format_bytes(shared_bytes)))
        self._places.clear()

    def _place_of(self, tensor: torch.Tensor) -> _Place | None:
        """None also if it has got other memory of another geometry since."""
        place = self._places.get(id(tensor))
        is_its = place is not None and place() is tensor and place.geometry == Geometry.of(tensor)
        return place if is_its else None

    def _new_place(self, tensor: torch.Tensor) -> _Place:
        self._free_the_dead()
        if (before := self._places.pop(id(tensor), None)) is not None:
            self._free(before)
        place = self._places[id(tensor)] = _Place(tensor, self._died.append)
        place.geometry = Geometry.of(tensor)
        try:
            place.offset, place.home = self._held(place.geometry, _bytes_in(tensor))
            place.holders = holders_of(place.home.untyped_storage())
            leave_out([place.home])
        except (OSError, ValueError) as error:  # a mapping begins at a multiple of the system's pages
            self._refuse(place, error)
        return place

    def _held(self, geometry: Geometry, size_bytes: int) -> tuple[int, torch.Tensor]:
        """Bytes of the host tier, and a tensor of that geometry on them."""
        engine = self._engine
        with engine.lock:
            first = engine.host.hold(size_bytes)
            try:
                engine.device.reserve_host(size_bytes, first, lasting=True)
                view = engine.device.host_view(size_bytes, first)
                return first, view.view(geometry.dtype).as_strided(geometry.shape, geometry.stride)
            except (OSError, ValueError):
                engine.host.let_go(first)
                raise

    def _refuse(self, place: _Place, error: Exception) -> None:
        place.is_refused = True
        if not self._is_told:
            self._is_told = True
            self._warn(NO_ROOM.format(getattr(error, "strerror", None) or os.strerror(errno.EIO)))

    def _free_the_dead(self) -> None:
        """The places of tensors that are gone are free."""
        dead = {id(place): place for place in (self._died.popleft() for _ in range(len(self._died)))}
        if dead:
            self._places = {key: place for key, place in self._places.items() if id(place) not in dead}
        for place in dead.values():
            self._free(place)

    def _free(self, place: _Place) -> None:
        """Its bytes are free, unless others hold tensors on them."""
        if not place.is_refused and not place.is_shared(None):
            with self._engine.lock:
                self._engine.host.let_go(place.offset)


def _bytes_in(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
