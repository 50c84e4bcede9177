"""The source of step peaks on a device: its own allocator, or, on a CPU without the compiled one, the events that
torch's allocator reports to a profiler. Compiled code is measured by these events too: no dispatch mode observes it,
because modes are off in a compiled forward, and a compiler such as Inductor allocates past the dispatcher.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping

import torch

from poochplan.formats.profile import Memory
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES, counted_bytes
from poochplan.runtime.devices.device import ComputeDevice
from poochplan.tensors.modes import behind_backward
from poochplan.torch_private.tensor_internals import (
    OUTSIDE,
    allocation_events,
    allocation_mark,
    graph_task,
    is_composite,
    log_allocations,
    storage_identity,
)

from .allocated import AllocatedPeak, PeakBytes, StepPeak, joined_count

_SET_ASIDE = "poochplan.set_aside"
_FREED = "poochplan.freed:"
RecordedEvent = tuple[str, str, int]
"""Kind, name and bytes."""
_MARK = "poochplan.mark:"


class DevicePeak(StepPeak):
    """The peak from the device's own allocator: CUDA's."""

    needs_census = False

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device

    def step_begins(self) -> None:
        self._device.start_step_peak()

    def now(self) -> PeakBytes | None:
        found = self._device.step_peak_bytes()
        return None if found is None else PeakBytes(found, found)


def step_peak_of(device: ComputeDevice, memory: Memory | None) -> StepPeak:
    """The device's allocator if it reports peaks; the compiled one if allocated bytes count; else torch's log.
    ``memory``: None for the most exact that can be counted here.
    """
    if device.step_peak_bytes() is not None:
        return DevicePeak(device)
    if memory is not Memory.LIVE and joined_count() is not None:
        return AllocatedPeak()
    return LoggedPeak(memory or Memory.LIVE)


class LoggedPeak(StepPeak):
    """Most bytes of a step: the memory that existed when it began, from a census, plus torch's log of the thread.

    It is known once the log has ended, and never under another profiler. It needs no dispatch mode.

    Parameters
    ----------
    memory: allocated bytes all count at every moment. Live bytes count only between ops: memory that an op takes and
        gives back inside, where no dispatch mode would look, is not live.
    """

    def __init__(self, memory: Memory) -> None:
        self._of_live = memory is Memory.LIVE
        self._least_bytes = 0 if self._of_live else LEAST_COUNTED_BYTES
        self._meter = CpuMeter()
        self._began_bytes = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def looked_around(self, storages: Mapping[int, torch.UntypedStorage], unseen_bytes: int = 0) -> None:
        counted = (counted_bytes(one.nbytes(), self._least_bytes) for one in storages.values())
        self._began_bytes = unseen_bytes + sum(counted)
        self._watched = {key: self._watch(storage) for key, storage in storages.items()}
        self._meter.begin()

    def mark(self, number: int) -> None:
        self._meter.mark(f"{_MARK}{number}")

    def ends(self) -> PeakBytes | None:
        self._watched.clear()
        events = self._meter.events()
        if events is None:
            return None
        most_bytes, mark = most_behind(events, of_live=self._of_live, least_bytes=self._least_bytes)
        peak_bytes = self._began_bytes + most_bytes
        return PeakBytes(peak_bytes, peak_bytes, mark)

    def _watch(self, storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
        key, size_bytes = storage_identity(storage), storage.nbytes()

        def died(_: object) -> None:
            if self._watched.pop(key, None) is not None:
                self._meter.freed(size_bytes)

        return weakref.ref(storage, died)


def most_behind(events: list[RecordedEvent], *, of_live: bool = False, least_bytes: int = 0) -> tuple[int, int]:
    """The most of the running sum of a log, at least 0, without blocks that were set aside, and the number of the last
    mark before it, else 0.
    """
    live = most = mark = found = 0
    for change, name, is_inside in _steps(events, least_bytes):
        live += change
        if name.startswith(_MARK):
            mark = int(name.removeprefix(_MARK))
        if live > most and not (of_live and is_inside):
            most, found = live, mark
    return most, found


def _steps(events: list[RecordedEvent], least_bytes: int) -> Iterator[tuple[int, str, bool]]:
    """For each event: the change of live bytes, its name, whether it is inside an op that modes see as one.

    Bytes are rounded, and less than ``least_bytes`` are left out. If mark and allocator both report a storage's death,
    it counts once. What the allocator frees right after a mark is the marked storage, whatever size it reports: torch
    knows sizes by address, and a block from before the log may lie where an earlier log had another one.
    """
    is_whole = is_aside = False
    around: list[tuple[bool, bool]] = []
    marked = told = 0
    """Bytes of the previous event, if it was a mark, or the allocator's."""
    is_right_after = False
    for kind, name, size_bytes in events:
        change = 0
        if kind == "push":
            around.append((is_whole, is_aside))
            is_whole, is_aside = is_whole or _is_whole(name), is_aside or name == _SET_ASIDE
            is_right_after = name.startswith(_FREED)
            if is_right_after and not is_aside:
                freed_bytes = int(name.removeprefix(_FREED))
                if told != -freed_bytes:
                    change = -counted_bytes(freed_bytes, least_bytes)
                    marked = freed_bytes
                told = 0
        elif kind == "pop" and around:
            is_whole, is_aside = around.pop()
        elif kind == "memory_alloc" and not is_aside:
            is_counted = size_bytes < 0 and bool(marked) and (is_right_after or marked == -size_bytes)
            if size_bytes > 0:
                change = counted_bytes(size_bytes, least_bytes)
            elif not is_counted:
                change = -counted_bytes(-size_bytes, least_bytes)
            told = size_bytes if size_bytes < 0 and not is_counted else 0
            marked = 0
        yield change, name, is_whole


@functools.cache
def _is_whole(name: str) -> bool:
    """Whether a block of a log is an op that a dispatch mode sees as one."""
    return "::" in name and not name.startswith("autograd::") and not is_composite(name)


# -- torch's log for profilers ---------------------------------------------------------------------------------------


class CpuMeter:
    """The CPU's allocations from :meth:`begin` on, on the calling thread. State: whether it has begun, and where."""

    def __init__(self) -> None:
        self._is_open = False
        self._began_in = OUTSIDE

    def begin(self) -> None:
        """Starts. A measurement that was begun and never ended, for example because backward raised, is discarded."""
        self.end()
        self._is_open, self._began_in = log_allocations(), graph_task()

    def events(self) -> list[RecordedEvent] | None:
        """Ends the log and returns its events. None if there is no log, for example under another profiler.

        Also None in a backward pass in which the log did not begin. When that ends, autograd restores its thread's
        state, with the log. Had it been ended before, torch's callbacks would stay, and break the next profiler.
        """
        if not self._is_open:
            return None
        self._is_open = False
        if graph_task() in (self._began_in, OUTSIDE):
            return allocation_events()
        if self._began_in == OUTSIDE:
            behind_backward(allocation_events)
        return None

    def end(self) -> int | None:
        """Ends the log. Returns the most bytes above those live at the start, each storage rounded up to its unit.

        None if that is unknown.
        """
        events = self.events()
        return None if events is None else most_behind(events)[0]

    def mark(self, name: str) -> None:
        if self._is_open:
            with allocation_mark(name):
                pass

    def freed(self, size_bytes: int) -> None:
        """A storage of that size dies. The allocator does not report this for one that was made before the code."""
        self.mark(f"{_FREED}{size_bytes}")

    def set_aside(self) -> contextlib.AbstractContextManager[object]:
        """A block whose allocations do not count."""
        return allocation_mark(_SET_ASIDE) if self._is_open else contextlib.nullcontext()
