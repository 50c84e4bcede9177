"""What tells the peaks of steps on a device, and the one that a device's own allocator tells."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from poochplan.formats.profile import Memory
from poochplan.runtime.devices.device import Device

from .allocated import AllocatedPeak
from .logged_peak import LoggedPeak
from .step_peak import StepPeak, Told


class DevicePeak:
    """As the device's own allocator tells: CUDA's."""

    needs_census = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self.arena_bytes = 0

    def step_begins(self) -> None:
        self._device.start_step_peak()

    def looked_around(self, storages: Mapping[int, torch.UntypedStorage], unseen_bytes: int = 0) -> None:
        """It knows."""

    def mark(self, number: int) -> None:
        """It is asked at each."""

    def now(self) -> Told | None:
        found = self._device.step_peak_bytes()
        return None if found is None else Told(found, found)

    def ends(self) -> Told | None:
        return None


def step_peak_of(device: Device, memory: Memory) -> StepPeak:
    """The device's allocator if it tells; the compiled one of the CPU where there is one, and what it hands out is to
    count; else torch's log for profilers.
    """
    if device.step_peak_bytes() is not None:
        return DevicePeak(device)
    found = AllocatedPeak() if memory is Memory.ALLOCATED else None
    return found if found is not None and found.has_allocator else LoggedPeak(memory)
