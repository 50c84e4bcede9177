"""The source of step peaks on a device: its own allocator, or, on a CPU without the compiled one, the events that
torch's allocator reports to a profiler.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping

import torch

from poochplan.formats.profile import Memory
from poochplan.formats.profile_parts import LEAST_COUNTED_BYTES, rounded_up
from poochplan.runtime.devices.device import Device
from poochplan.torch_private.tensor_internals import is_composite, storage_identity

from .allocated import AllocatedPeak, StepPeak, Told
from .compiled_code import CpuMeter, Event, changes

_MARK = "poochplan.mark:"


class DevicePeak(StepPeak):
    """The peak from the device's own allocator: CUDA's."""

    needs_census = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def step_begins(self) -> None:
        self._device.start_step_peak()

    def now(self) -> Told | None:
        found = self._device.step_peak_bytes()
        return None if found is None else Told(found, found)


def step_peak_of(device: Device, memory: Memory) -> StepPeak:
    """The device's allocator if it reports peaks. The CPU's compiled allocator if there is one and allocated bytes
    count. Otherwise torch's log for profilers.
    """
    if device.step_peak_bytes() is not None:
        return DevicePeak(device)
    found = AllocatedPeak() if memory is Memory.ALLOCATED else None
    return found if found is not None and found.has_allocator else LoggedPeak(memory)


class LoggedPeak(StepPeak):
    """Most bytes of a step: the memory that existed when it began, from a census, plus torch's log of the thread.

    It is known once the log has ended, and never under another profiler. The log observes ops as a profiler does, so it
    needs no dispatch mode.

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
        """A step begins, and exactly these storages exist, plus ``unseen_bytes`` that no tensor shows."""
        sizes = [one.nbytes() for one in storages.values() if one.nbytes() >= self._least_bytes]
        self._began_bytes = unseen_bytes + sum(map(rounded_up, sizes))
        self._watched = {key: self._watch(storage) for key, storage in storages.items()}
        self._meter.begin()

    def mark(self, number: int) -> None:
        """The step has reached that point."""
        self._meter.mark(f"{_MARK}{number}")

    def ends(self) -> Told | None:
        """None if the peak is unknown. Idempotent."""
        self._watched.clear()
        events = self._meter.events()
        if events is None:
            return None
        most_bytes, mark = most_behind(events, of_live=self._of_live, least_bytes=self._least_bytes)
        peak_bytes = self._began_bytes + most_bytes
        return Told(peak_bytes, peak_bytes, mark)

    def _watch(self, storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
        key, size_bytes = storage_identity(storage), storage.nbytes()

        def died(_: object) -> None:
            if self._watched.pop(key, None) is not None:
                self._meter.freed(size_bytes)

        return weakref.ref(storage, died)


def most_behind(events: list[Event], *, of_live: bool, least_bytes: int) -> tuple[int, int]:
    """The most of the running sum of a log, at least 0, and the number of the last mark before it, else 0."""
    live = most = mark = found = 0
    for change, name, is_inside in _steps(events, least_bytes):
        live += change
        if name.startswith(_MARK):
            mark = int(name.removeprefix(_MARK))
        if live > most and not (of_live and is_inside):
            most, found = live, mark
    return most, found


def _steps(events: list[Event], least_bytes: int) -> Iterator[tuple[int, str, bool]]:
    """For each event: the change of live bytes, its name, and whether it is inside an op that a dispatch mode sees as
    one, and not as several.
    """
    inside: list[bool] = []
    for (kind, name, _), change in zip(events, changes(events, least_bytes), strict=True):
        if kind == "push":
            inside.append((inside[-1] if inside else False) or _is_whole(name))
        elif kind == "pop" and inside:
            inside.pop()
        yield change, name, inside[-1] if inside else False


@functools.cache
def _is_whole(name: str) -> bool:
    """Whether a block of a log is an op that a dispatch mode sees as one."""
    return "::" in name and not name.startswith("autograd::") and not is_composite(name)
