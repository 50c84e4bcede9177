"""What the allocator tells: as ``PYTORCH_ALLOC_CONF`` has it, to the user and to a session, and where it is short."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import poochplan
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.planner.planning import smallest_budget
from poochplan.runtime.devices.allocator import EXPANDING, THEIRS, expanding
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.high_water import HighWater
from poochplan.runtime.engine.audit import RESULT_BYTES, SCRATCH_BYTES
from poochplan.runtime.run_report import Report
from tests.cuda_rules.machine import WHERE, Machine
from tests.gpu.cases import CASES, PLANNED_BY
from tests.online.caches import empty_cache
from tests.runtime.nets import LINK, Case, followed, train
from tests.runtime.random_plans import random_plan

MIB = 1 << 20
CASE = CASES["large"]


def _alone(case: Case, plan: Plan, steps: int, **options: Any) -> Report:
    """The report of steps beside which nothing lies."""
    model, step, optimizer = case.fresh()
    with poochplan.apply(plan, model, **options) as session:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            step().backward()
            optimizer.step()
    report: Report = session.report()
    return report


@pytest.mark.parametrize("configured", ["native", "expandable_segments", "cudaMallocAsync"])
def test_a_plan_is_kept_whatever_the_allocator_and_what_it_hands_out_is_as_predicted(
    gpu: Machine, configured: str
) -> None:
    gpu.memory.set(f"expandable_segments:{configured == 'expandable_segments'}")
    gpu.memory.backend = "cudaMallocAsync" if configured == "cudaMallocAsync" else "native"
    profile = CASE.new_profile()  # as this allocator has it
    smallest = smallest_budget(profile)
    budget_bytes = smallest + (profile.in_core_peak_bytes - smallest) // 4
    plan = poochplan.plan(profile, budget_bytes, time_limit_s=5, evaluations=100, on="allocated")
    followed(CASE, plan, 3, wanted=train(CASE, 3)[0])
    report = _alone(CASE, plan, 3, on_audit="off")
    assert report.last_step.out_bytes + report.last_step.replayed_values > 0
    assert report.memory is not None
    assert report.total.peak_bytes is not None
    predicted = plan.prediction
    assert 0 < report.total.peak_bytes <= max(predicted.peak_bytes, predicted.first_step_peak_bytes)
    assert predicted.allocated_peak_bytes is not None
    if configured == "native":
        assert report.total.peak_bytes < report.memory.allocated_bytes <= predicted.allocated_peak_bytes
    else:
        most_bytes = max(predicted.peak_bytes, predicted.first_step_peak_bytes)
        assert report.total.peak_bytes <= report.memory.allocated_bytes <= most_bytes


@pytest.mark.parametrize("backend", ["pluggable", "another"])
def test_an_allocator_that_counts_nothing_is_refused(gpu: Machine, backend: str) -> None:
    gpu.memory.backend = backend
    with pytest.raises(UsageError, match=f"which tells what a step takes, found {backend}; run without"):
        CudaDevice(WHERE)


def test_a_report_says_how_often_the_allocator_had_to_give_back_its_cache(gpu: Machine) -> None:
    plan = random_plan(CASE.profile(), 0, (0, 1, 0))
    model, step, _ = CASE.fresh()
    with (
        pytest.warns(RuntimeWarning, match="its allocator emptied its cache and tried again"),
        poochplan.apply(plan, model) as session,
    ):
        before = session.report().memory
        step().backward()
        gpu.memory.limit_bytes = gpu.memory.reserved_bytes
        torch.full((3 * MIB,), 1, dtype=torch.uint8, device=WHERE)  # fits nothing that is cached
        report = session.report()
    assert before is not None
    assert before.retries == 0
    assert report.memory is not None
    assert report.memory.retries == 1
    assert "caches emptied" in str(report)


@pytest.mark.parametrize("theirs", ["", "max_split_size_mb:64"])
def test_the_last_of_several_sessions_to_end_undoes_its_setting_and_no_other(gpu: Machine, theirs: str) -> None:
    """Of those that a user has made meanwhile, none is undone."""
    first, second = ExitStack(), ExitStack()
    with second:
        with first:
            lines = [session.enter_context(expanding(WHERE)).line for session in (first, second)]
        assert lines == [EXPANDING, EXPANDING]
        assert gpu.memory.settings == "expandable_segments:True"
        if theirs:
            gpu.memory.set(theirs)
        with expanding(WHERE) as third:
            assert third.line.startswith(THEIRS.format(theirs) if theirs else EXPANDING)
    assert gpu.memory.settings == theirs


@pytest.mark.parametrize("of", [torch.cuda, torch.accelerator], ids=["cuda", "accelerator"])
def test_the_users_peaks_and_resets_are_theirs_by_either_name(gpu: Machine, of: object) -> None:
    plan = random_plan(CASE.profile(), 0, (0, 1, 0))
    model, step, _ = CASE.fresh()
    large = torch.empty(256 * MIB, dtype=torch.uint8, device=WHERE)
    del large
    assert of.max_memory_allocated() >= 256 * MIB  # type: ignore[attr-defined]
    with poochplan.apply(plan, model) as session:
        step().backward()
        assert of.max_memory_allocated() >= 256 * MIB  # type: ignore[attr-defined]
        of.reset_peak_memory_stats()  # type: ignore[attr-defined]
        assert torch.cuda.max_memory_allocated() < 256 * MIB
        assert torch.accelerator.max_memory_allocated() < 256 * MIB
        step().backward()
        memory = session.report().memory
    assert memory is not None
    assert memory.allocated_bytes < 256 * MIB


def test_a_profile_changes_no_peak_that_the_user_reads(gpu: Machine) -> None:
    large = torch.empty(256 * MIB, dtype=torch.uint8, device=WHERE)
    del large
    CASE.new_profile()
    assert torch.cuda.max_memory_allocated() == torch.accelerator.max_memory_allocated() == 256 * MIB


def test_a_step_that_auto_studies_is_in_the_peaks_of_its_session(gpu: Machine, tmp_path: Path) -> None:
    model, step, optimizer = CASE.fresh()
    options: dict[str, Any] = {"budget": "80%", "link": LINK, "quiet": True, "time_limit_s": 0.5}
    with empty_cache(tmp_path), poochplan.auto(model, optimizer, **options) as session:
        for _ in range(PLANNED_BY):
            optimizer.zero_grad(set_to_none=True)
            step().backward()
            optimizer.step()
        session.wait_until_planned(240)
        memory = session.report().memory
    assert session.profile is not None
    assert memory is not None
    assert memory.allocated_bytes == torch.cuda.max_memory_allocated() == gpu.memory.most_allocated_bytes


def _highest(marks: HighWater, index: int = 0) -> int:
    """What the user reads, in MiB."""
    return int(marks.stats(index)["allocated_bytes"]["all"]["peak"]) // MIB


def test_steps_and_their_parts_have_peaks_of_their_own_and_the_users_mark_stays_the_highest_until_they_reset_it(
    gpu: Machine,
) -> None:
    def take(size_mib: int) -> None:
        gpu.memory.allocate(size_mib * MIB, gpu.default_stream)  # and lets them go

    marks = HighWater(lambda _: gpu.memory.statistics(), lambda _: gpu.memory.begin_peaks(), lambda _: {})
    take(100)
    for size_mib in (30, 50):
        marks.begin(0)
        take(size_mib)
        assert marks.since_begin(0, "allocated_bytes") == size_mib * MIB
        assert _highest(marks) == 100
    for size_mib in (20, 30):
        marks.begin_part(0)
        take(size_mib)
        assert marks.of_part(0, "allocated_bytes") == (0, size_mib * MIB)
        assert marks.since_begin(0, "allocated_bytes") == 50 * MIB
        assert _highest(marks) == 100
    marks.reset(0)
    assert marks.since_begin(0, "allocated_bytes") == 50 * MIB
    assert _highest(marks) == 0
    take(40)
    marks.begin(0)
    take(10)
    assert _highest(marks) == 40
    assert _highest(marks, 1) == 10, "of another GPU nothing was kept"


@pytest.mark.parametrize("more_bytes", [0, SCRATCH_BYTES + RESULT_BYTES, MIB])
@pytest.mark.parametrize("meter", ["always", "never"])
def test_what_the_audit_takes_lies_between_the_peak_and_the_budget(gpu: Machine, more_bytes: int, meter: str) -> None:
    """Without room nothing is compared, with a little checksums are, and with more a value is kept beside."""
    case = CASES["residual"]
    plan = random_plan(case.profile(), 0, (0, 1, 0))
    peak_bytes = _alone(case, plan, 6, on_audit="off").total.peak_bytes
    assert peak_bytes is not None
    prediction = msgspec.structs.replace(plan.prediction, peak_bytes=peak_bytes)
    plan = msgspec.structs.replace(plan, budget_bytes=peak_bytes + more_bytes, prediction=prediction)
    total = _alone(case, plan, 6, meter=meter).total
    assert (total.audited_values > 0) is (more_bytes > 0)
    if meter == "always":
        assert total.peak_bytes is not None
        assert peak_bytes <= total.peak_bytes <= plan.budget_bytes
        assert (total.peak_bytes > peak_bytes + SCRATCH_BYTES + RESULT_BYTES) is (more_bytes == MIB)
