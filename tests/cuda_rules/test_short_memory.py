"""Where memory is short on the stand-in: while a step is profiled, in a planned one, and under a cap."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import poochplan
from poochplan.errors import UsageError
from poochplan.planner.planning import smallest_budget
from poochplan.units import format_bytes
from tests.cuda_rules.machine import WHERE, Machine, on_stand_in
from tests.gpu.cases import CASES
from tests.online.caches import empty_cache
from tests.runtime.nets import LINK, train


@pytest.fixture
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
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
    assert f"of a budget of {format_bytes(plan.budget_bytes)}; beside what was predicted there are" in note
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
