"""What compiled code takes, from the allocator's events."""

from __future__ import annotations

import weakref

import torch

from poochplan.runtime.metering.compiled_code import CpuMeter, most_bytes


def test_compiled_code_tells_the_most_that_was_live_at_once_above_its_begin() -> None:
    meter = CpuMeter()
    meter.begin()
    first = torch.ones(1024)
    second = first.neg()
    del first, second
    torch.ones(256)
    assert meter.end() == 2 * 4096
    assert meter.end() is None


def test_what_is_set_aside_does_not_count() -> None:
    meter = CpuMeter()
    meter.begin()
    with meter.set_aside():
        copy = torch.ones(100_000).clone()
    torch.ones(128)
    assert meter.end() == 512
    del copy


def test_a_storage_from_before_that_dies_in_the_code_makes_room() -> None:
    meter = CpuMeter()
    before = torch.ones(1024)
    watch = weakref.ref(before.untyped_storage(), lambda _: meter.freed(4096))
    meter.begin()
    del before
    after = torch.ones(2048)
    assert meter.end() == 4096
    del watch, after


def test_a_storage_whose_death_is_told_twice_makes_room_once() -> None:
    alloc, free = ("memory_alloc", "", 4096), ("memory_alloc", "", -4096)
    mark = [("push", "poochplan.freed:4096", 0), ("pop", "", 0)]
    large = ("memory_alloc", "", 8192)
    assert most_bytes([alloc, alloc, *mark, free, large]) == 4096 + 8192
    assert most_bytes([alloc, alloc, free, *mark, large]) == 4096 + 8192
    assert most_bytes([alloc, alloc, free, free, large]) == 8192
    assert most_bytes([alloc, alloc, *mark, *mark, large]) == 8192


def test_a_marked_storage_makes_room_for_its_own_bytes_where_torch_reports_those_of_an_earlier_one() -> None:
    op = [("push", "aten::sin", 0), ("pop", "", 0)]
    mark, stale = [("push", "poochplan.freed:4096", 0), ("pop", "", 0)], ("memory_alloc", "", -8192)
    new = ("memory_alloc", "", 16384)
    assert most_bytes([*mark, stale, new]) == 16384 - 4096
    assert most_bytes([*mark, *op, stale, new]) == 16384 - 4096 - 8192  # another one, behind an op


def test_a_meter_that_was_never_ended_is_forgotten() -> None:
    meter = CpuMeter()
    meter.begin()
    torch.ones(100_000)
    meter.begin()
    torch.ones(128)
    assert meter.end() == 512


def test_compiled_code_under_another_profiler_is_unknown_and_leaves_that_one_alone() -> None:
    meter = CpuMeter()
    with torch.profiler.profile() as profiler:
        meter.begin()
        torch.ones(128)
        assert meter.end() is None
    assert any(event.name == "aten::ones" for event in profiler.events())
