"""Device memory: one range of addresses, and a caching allocator that hands freed blocks out at once."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from .streams import Accesses, Host, Mark, Stream

TOTAL_BYTES = 16 << 30
"""What the simulated GPU has."""
POISON = 0xFF
"""A byte that makes every floating-point type NaN, and an integer -1."""
_POISONED_BYTES = 8 << 20
_UNIT_BYTES = 512
_LEAST_SPLIT_BYTES, _ROUND_LARGE_BYTES, _LEAST_ROUNDED_BYTES = 1 << 20, 2 << 20, 10 << 20
"""Of the native allocator: the least that is split off a large block, and to what large segments are rounded."""
_ADDRESSES_BYTES = 256 << 30
_NO_RESERVE = 0x4000  # ``MAP_NORESERVE``, which Python names from 3.13 on
_MAP = mmap.mmap(-1, _ADDRESSES_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
_FIRST = ctypes.addressof(ctypes.c_ubyte.from_buffer(_MAP))
_EMPTY: dict[int, weakref.ref[torch.UntypedStorage]] = {}
"""Device storages of no bytes, by identity: no address tells of these."""
_top = 0


def is_device_address(pointer: int) -> bool:
    return _FIRST <= pointer < _FIRST + _ADDRESSES_BYTES


def is_on_device(storage: torch.UntypedStorage) -> bool:
    return is_device_address(storage.data_ptr()) or storage._cdata in _EMPTY


@dataclass(eq=False)
class Block:
    """Memory that one storage after another has."""

    address: int
    room_bytes: int
    size_bytes: int = 0
    """What was asked for, in whole units. Counted until the block may be handed out again."""
    counted_bytes: int = 0
    """What is taken of the block: where no rest is split off, all of it."""
    stream: Stream | None = None
    recorded: set[Stream] = field(default_factory=set)
    accesses: Accesses = field(default_factory=Accesses)


class DeviceMemory:
    """The caching allocator. Freed blocks go back to the stream they were allocated on, and wait for those recorded.

    As ``PYTORCH_ALLOC_CONF`` has it: ``expandable`` segments, ``backend`` (``cudaMallocAsync`` counts no requests).
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []
        self._cached: list[Block] = []
        self._deferred: list[tuple[Block, list[Mark]]] = []
        self.limit_bytes = TOTAL_BYTES
        """The allocator's own; the GPU does not know it."""
        self.expandable, self.backend = False, "native"
        self.settings = ""
        """As a user, or a session, has set them."""
        self.now = {"allocated_bytes": 0, "requested_bytes": 0, "reserved_bytes": 0}
        self.peaks = dict(self.now)
        self.most_allocated_bytes = 0
        """Ever: whoever begins peaks anew does not change it."""
        self.fragment_bytes = 0
        """Rests beside blocks that somebody has."""
        self.retries = 0

    def allocate(self, size_bytes: int, stream: Stream) -> torch.UntypedStorage:
        """A storage on ``stream``; poisoned by a write of that stream's."""
        if size_bytes == 0:
            return _without_bytes()
        asked_bytes = -(-size_bytes // _UNIT_BYTES) * _UNIT_BYTES
        self._take_back()
        block = self._cached_block(asked_bytes, stream) or self._new_block(asked_bytes, stream)
        block.size_bytes, block.counted_bytes = asked_bytes, self._counted(block.room_bytes, asked_bytes)
        self.fragment_bytes += block.room_bytes - block.counted_bytes
        self._add(allocated_bytes=block.counted_bytes, requested_bytes=asked_bytes)
        stream.catch_up()
        ctypes.memset(block.address, POISON, min(size_bytes, _POISONED_BYTES))
        memory = (ctypes.c_ubyte * size_bytes).from_address(block.address)
        weakref.finalize(memory, self._free, block).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    @property
    def allocated_bytes(self) -> int:
        return self.now["allocated_bytes"]

    @property
    def reserved_bytes(self) -> int:
        return self.now["reserved_bytes"]

    def statistics(self) -> dict[str, Any]:
        """As ``torch._C`` gives them."""
        found: dict[str, Any] = {
            name: {"all": {"current": self.now[name], "peak": self.peaks[name]}} for name in self.now
        }
        found["inactive_split_bytes"] = {"all": {"current": self.fragment_bytes, "peak": self.fragment_bytes}}
        if self.backend != "native":
            found["requested_bytes"] = {"all": {"current": 0, "peak": 0}}
        return {**found, "num_ooms": 0, "num_alloc_retries": self.retries}

    def snapshot(self) -> dict[str, Any]:
        """The settings alone."""
        return {
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": self.settings,
                "expandable_segments": self.expandable,
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "roundup_power2_divisions": {"1": 0},
            }
        }

    def set(self, settings: str) -> None:
        self.settings = settings
        if "expandable_segments" in settings:
            self.expandable = "expandable_segments:True" in settings

    def begin_peaks(self) -> None:
        self.peaks = dict(self.now)

    def _add(self, **changes: int) -> None:
        for name, change in changes.items():
            self.now[name] += change
            self.peaks[name] = max(self.peaks[name], self.now[name])
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)

    def _counted(self, room_bytes: int, wanted_bytes: int) -> int:
        """What a request takes of a block: the rest is split off where it is large enough."""
        if self.expandable or self.backend != "native" or wanted_bytes <= _LEAST_SPLIT_BYTES:
            return wanted_bytes
        return wanted_bytes if room_bytes - wanted_bytes > _LEAST_SPLIT_BYTES else room_bytes

    def block_at(self, address: int) -> Block | None:
        """The block of this allocator's that the address is in; None for one of an earlier machine."""
        index = bisect.bisect_right(self._addresses, address) - 1
        block = self._blocks[self._addresses[index]] if index >= 0 else None
        return block if block is not None and address < block.address + block.room_bytes else None

    def empty_cache(self) -> None:
        """Gives back what nobody has, as ``cudaFree`` does: when the device has nothing left to do."""
        for stream in list(self._host.streams):
            stream.synchronise()
        self._take_back()
        for block in self._cached:
            self._add(reserved_bytes=-block.room_bytes)
            self._addresses.remove(block.address)
            del self._blocks[block.address]
            pages = -(-(block.address - _FIRST) // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (block.address - _FIRST + block.room_bytes - pages) // mmap.PAGESIZE * mmap.PAGESIZE
            if length > 0:
                _MAP.madvise(mmap.MADV_DONTNEED, pages, length)
        self._cached = []

    def _cached_block(self, wanted_bytes: int, stream: Stream) -> Block | None:
        for index in reversed(range(len(self._cached))):  # the one freed last
            block = self._cached[index]
            if block.stream is stream and wanted_bytes <= block.room_bytes <= 2 * wanted_bytes:
                return self._cached.pop(index)
        return None

    def _new_block(self, wanted_bytes: int, stream: Stream) -> Block:
        global _top
        if wanted_bytes >= _LEAST_ROUNDED_BYTES and not self.expandable and self.backend == "native":
            wanted_bytes = -(-wanted_bytes // _ROUND_LARGE_BYTES) * _ROUND_LARGE_BYTES
        if self.reserved_bytes + wanted_bytes > self.limit_bytes:
            self.retries += 1
            self.empty_cache()
        if self.reserved_bytes + wanted_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {wanted_bytes} bytes.")
        block = Block(_FIRST + _top, wanted_bytes, stream=stream)
        _top += wanted_bytes
        assert _top <= _ADDRESSES_BYTES, "the stand-in has run out of addresses"
        self._blocks[block.address] = block
        self._addresses.append(block.address)  # addresses only grow
        self._add(reserved_bytes=wanted_bytes)
        return block

    def _free(self, block: Block) -> None:
        self.fragment_bytes -= block.room_bytes - block.counted_bytes
        self._add(allocated_bytes=-block.counted_bytes)
        assert block.stream is not None
        known = block.recorded | {block.stream}
        for what in block.accesses.unknown_to(block.stream):
            if what.startswith("a copy") and len(known) == 1:
                self._host.violations.append(f"{block.size_bytes} bytes were let go beside {what}")
        marks = [stream.mark() for stream in block.recorded]
        block.recorded = set()
        if marks:
            self._deferred.append((block, marks))
        else:
            self._cache(block)

    def _cache(self, block: Block) -> None:
        """It may be handed out again."""
        self._add(requested_bytes=-block.size_bytes)
        self._cached.append(block)

    def _take_back(self) -> None:
        """Blocks whose recorded streams have got where they were when it was freed."""
        for block, marks in list(self._deferred):
            if all(mark.has_run for mark in marks):
                for mark in marks:
                    self._host.learns(mark)
                self._deferred.remove((block, marks))
                self._cache(block)


def _without_bytes() -> torch.UntypedStorage:
    storage = torch.UntypedStorage(0)
    key = storage._cdata
    _EMPTY[key] = weakref.ref(storage, lambda _: _EMPTY.pop(key, None))
    return storage
