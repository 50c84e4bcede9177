"""Where memory is short on the stand-in: for the link test, while a step is profiled, in a planned one, under a cap."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import poochplan
from poochplan.errors import SpillError, UsageError
from poochplan.planner.planning import smallest_budget
from poochplan.profiler import link as links
from poochplan.units import format_bytes
from tests.cuda_rules.machine import WHERE, Machine, on_stand_in
from tests.gpu.cases import CASES
from tests.online.caches import empty_cache
from tests.runtime.nets import LINK, train


@pytest.fixture
def gpu(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(links, "CUDA_PROBE", (64, 1 << 16))
    with empty_cache(tmp_path_factory.mktemp("user")), on_stand_in() as machine:
        yield machine
        assert machine.violations == []
        assert machine.host_memory.pinned == {}


def test_a_step_that_runs_out_of_memory_while_it_is_profiled_is_profiled_swapping(gpu: Machine) -> None:
    case = CASES["large"]
    gpu.memory.limit_bytes = case.new_profile().in_core_peak_bytes * 3 // 4
    torch.cuda.empty_cache()
    profile = case.new_profile(mode="auto")
    assert profile.mode == "swap-all"
    assert any("ran out of the device's memory" in note for note in profile.notes)
    assert profile.in_core_peak_bytes > gpu.memory.limit_bytes
    plan = poochplan.plan(profile, int(1.1 * smallest_budget(profile)), evaluations=100)
    assert train(case, 1, plan)[1].total.fallbacks == 0  # type: ignore[union-attr]


def test_a_planned_step_that_runs_out_of_memory_says_where_and_who_holds_it(gpu: Machine) -> None:
    case = CASES["large"]
    profile = case.new_profile()
    plan = poochplan.plan(profile, "95%", policy="greedy")
    model, step, _ = case.fresh()
    beside = torch.empty(48 << 20, dtype=torch.uint8, device=WHERE)
    gpu.memory.limit_bytes = gpu.memory.allocated_bytes + plan.prediction.peak_bytes // 2
    with pytest.raises(torch.OutOfMemoryError) as raised, poochplan.apply(plan, model, profile=profile):
        for _ in range(2):
            step().backward()
    (note,) = raised.value.__notes__
    del raised  # its frames hold what the step has saved
    gc.collect()
    assert note.startswith("poochplan: out of memory in a step that follows the plan, in ")
    assert f"of a budget of {format_bytes(plan.budget_bytes)}; in addition to the prediction there are" in note
    assert "(48.0 MiB)" in note.splitlines()[0]
    assert len(note.splitlines()) > 3
    assert beside.nbytes == 48 << 20


def test_auto_has_a_cap_from_its_first_step_on(gpu: Machine) -> None:
    model, step, optimizer = CASES["large"].fresh()
    options: dict[str, Any] = {"budget": "80%", "link": LINK, "quiet": True}
    before = gpu.memory.limit_bytes
    cap_bytes = torch.cuda.memory_allocated() + (64 << 20)
    with poochplan.auto(model, optimizer, cap_bytes=cap_bytes, **options):
        step().backward()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(65 << 20, dtype=torch.uint8, device=WHERE)
    assert gpu.memory.limit_bytes == before
    with pytest.raises(UsageError, match="expected a model on cuda, whose allocator takes a limit, found one on cpu"):
        poochplan.auto(torch.nn.Linear(2, 2), cap_bytes=1, **options)


MIB = 1 << 20
SIZES = (MIB // 16, MIB // 4, MIB)


def _sizes_measured() -> list[int]:
    return [size for size, _ in links.measure_link(WHERE, sizes=SIZES).outward.curve]


def test_sizes_follow_what_can_be_pinned(gpu: Machine) -> None:
    gpu.host_memory.most_bytes = MIB
    assert _sizes_measured() == list(SIZES[:2])


def test_sizes_follow_what_the_device_has_left(gpu: Machine) -> None:
    gpu.memory.limit_bytes = 3 * MIB
    assert _sizes_measured() == list(SIZES[:2])
    assert gpu.memory.peaks["reserved_bytes"] <= 3 * MIB


def test_sizes_follow_what_the_host_has_left(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "available_bytes", lambda: MIB)
    assert _sizes_measured() == [SIZES[0]]


def test_where_nothing_can_be_pinned_one_line_says_what_to_do(gpu: Machine) -> None:
    gpu.host_memory.most_bytes = 4096
    with pytest.raises(SpillError, match=r"128 KiB of host memory that can be pinned, found none .*; free host"):
        links.measure_link(WHERE, sizes=SIZES)
