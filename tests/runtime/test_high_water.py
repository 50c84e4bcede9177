"""Peaks of single steps from one allocator's marks: the user reads what they would have read without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poochplan.runtime.devices.cuda import HighWater, high_water


class Allocator:
    """One that counts, with the marks that torch gives: nested by statistic and pool, beside plain numbers."""

    def __init__(self) -> None:
        self.current = self.peak = 0

    def take(self, size_bytes: int) -> None:
        self.current += size_bytes
        self.peak = max(self.peak, self.current)

    def stats(self, index: int) -> dict[str, Any]:
        return {
            name: {"all": {"current": self.current, "peak": self.peak, "allocated": 9, "freed": 9}}
            for name in ("allocated_bytes", "requested_bytes", "reserved_bytes")
        } | {"num_ooms": 0}

    def reset(self, index: int) -> None:
        self.peak = self.current


def test_steps_are_told_apart_and_the_users_mark_stays_the_highest() -> None:
    allocator = Allocator()
    both = HighWater(allocator.stats, allocator.reset)
    allocator.take(100)
    allocator.take(-100)
    steps = []
    for size_bytes in (30, 50, 20):
        both.begin(0)
        allocator.take(size_bytes)
        allocator.take(-size_bytes)
        steps.append(both.since_begin(0, "allocated_bytes"))
        assert both.stats(0)["allocated_bytes"]["all"]["peak"] == 100
    assert steps == [30, 50, 20]


def test_the_users_own_reset_begins_their_mark_anew() -> None:
    allocator = Allocator()
    both = HighWater(allocator.stats, allocator.reset)
    allocator.take(100)
    allocator.take(-90)
    both.begin(0)
    both.reset(0)
    assert both.stats(0)["allocated_bytes"]["all"]["peak"] == 10
    allocator.take(5)
    both.begin(0)
    allocator.take(1)
    assert both.stats(0)["reserved_bytes"]["all"] == {"current": 16, "peak": 16, "allocated": 9, "freed": 9}
    assert both.stats(1)["reserved_bytes"]["all"]["peak"] == 16, "of another GPU nothing was kept"


def test_what_torch_gives_the_user_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", allocator.stats, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", allocator.reset, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", allocator.stats, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_resetPeakStats", allocator.reset, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional=False: 0)
    allocator.take(70)
    allocator.take(-70)
    high_water().begin(0)
    allocator.take(10)
    assert high_water() is high_water()
    assert high_water().since_begin(0, "requested_bytes") == 10
    assert torch.cuda.max_memory_allocated() == 70
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 10
