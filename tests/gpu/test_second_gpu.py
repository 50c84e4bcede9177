"""A model on ``cuda:1`` while device 0 is current: nothing is asked of device 0, and nothing is put there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import poochplan
from poochplan.profiler.link import measure_link
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.pinned import PAGE_BYTES
from poochplan.runtime.devices.transfers import copy_out
from poochplan.verify import check
from poochplan.workload import Workload
from tests.cuda_rules.machine import MACHINE, on_stand_in
from tests.gpu import cases
from tests.gpu.conftest import small_measurements
from tests.online.caches import empty_cache
from tests.runtime.nets import LINK, followed, train
from tests.runtime.random_plans import random_plan

pytestmark = [
    *cases.ABOUT_CUDA,
    pytest.mark.skipif(cases.ON_A_GPU and torch.cuda.device_count() < 2, reason="there is one GPU"),
]
SECOND = torch.device("cuda", 1)
NETS = cases.OF_KNOWN_PEAK if cases.ON_A_GPU else ("residual", "checkpointed", "two_streams_wait", "sdpa_flash")
"""What names a GPU: copies, a checkpoint's generator, streams, a kernel's generator."""


@pytest.fixture(autouse=True, scope="module")
def _a_gpu() -> None:
    """Each test has its own."""


@pytest.fixture(autouse=True, params=[True, False], ids=["cupy", "registered"])
def _on_the_second(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cases, "WHERE", SECOND)
    if cases.ON_A_GPU:
        if not request.param:
            monkeypatch.setattr("poochplan.runtime.devices.cuda.cupy_or_none", lambda: None)
        yield
        return
    with on_stand_in(cupy=request.param, index=1) as machine:
        yield
        assert machine.violations == []
        assert machine.host_memory.pinned == {}


@pytest.mark.parametrize("name", cases.each(NETS, ("residual",)))
def test_a_step_is_profiled_and_its_plans_are_followed_there(name: str) -> None:
    case = cases.case_of(name)
    profile = case.new_profile()
    assert torch.cuda.current_device() == 0
    assert all(op.duration_s >= 0 for op in profile.ops)
    report = followed(case, random_plan(profile, 1), wanted=cases.reference(case, 2))
    assert report.memory is not None
    assert report.memory.allocated_bytes > 0
    cases.takes_what_is_predicted(case, profile)


@pytest.mark.needs("numerics", "the check compares what two in-core runs compute")
def test_a_plan_is_checked_beside_in_core_steps_there() -> None:
    case = cases.CASES["embedding"]
    plan = random_plan(case.new_profile(), 0)
    assert check(lambda: Workload(*case.fresh()), plan, steps=1, timed_steps=1).difference is None


def test_auto_studies_plans_and_follows_there(tmp_path: Path) -> None:
    case = cases.CASES["embedding"]
    (tmp_path / "user").mkdir()
    with empty_cache(tmp_path / "user"):
        in_core = cases.in_host_memory(train(case, cases.PLANNED_BY + 4)[0])
        model, step, optimizer = case.fresh()
        torch.manual_seed(1)
        options: dict[str, Any] = {"link": LINK, "time_limit_s": 0.5, "on_over_budget": "warn", "quiet": True}
        options["on"] = "allocated"  # so small a network reserves one page, whatever is planned
        with poochplan.auto(model, optimizer, budget="95%", cache=tmp_path, **options) as session:
            seen = cases.turns_until_planned(session, (model, step, optimizer), cases.PLANNED_BY + 4)
    assert cases.same_bits(in_core, seen)


def test_its_link_is_measured_and_pages_are_pinned_for_it() -> None:
    with small_measurements() if MACHINE else contextlib.nullcontext():
        assert measure_link(SECOND).outward.bandwidth_bytes_per_s > 0
    device = CudaDevice(SECOND)
    copy_out(device, device.allocate(4096), 0).wait()
    device.trim_host([])
    copy_out(device, device.allocate(4096), PAGE_BYTES).wait()
    device.close()
    assert torch.cuda.current_device() == 0
