"""Loops on torch's own CUDA code: allocator, streams, autograd's device thread. No bits: no kernel computes any.

``POOCH_RAISES`` is on, so an error of ours is raised. Peaks are the allocator's own, beside what plans promise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.profiler.capture.clock import DeviceClock
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.transfers import copy_out
from tests.online.caches import empty_cache
from tests.runtime.nets import LINK, Case
from tests.runtime.random_plans import random_plan

WHERE = torch.device("cuda", 0)
STEPS, PLANNED_BY = 60, 20
MIB = 1 << 20
ROWS, WIDTH = 4096, 256


class Stages(nn.Module):
    """Blocks with buffers that forward writes, of which a step may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(8)
        )
        self.path = range(8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number in self.path:
            rows = rows + self.blocks[number](rows)
        return rows


def _stages() -> Any:
    rows = torch.randn(ROWS, WIDTH).to(WHERE)
    return Stages().to(WHERE), lambda model: model(rows).square().mean()


CASE = Case(_stages)
PATHS = range(8), (0, 1, 3, 4, 6, 7), (0, 2, 5)
LEFT_OUT = pytest.mark.parametrize("paths", [PATHS[:1], PATHS], ids=["all layers", "some left out"])


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with empty_cache(tmp_path_factory.mktemp("user")):
        yield


def _budget(profile: Profile, share: float) -> int:
    smallest = smallest_budget(profile)
    return int(smallest + share * (profile.in_core_peak_bytes - smallest))


def _turns(training: Any, paths: Any, turned: Any = lambda number: None, since: int = 0) -> list[int]:
    """Trains, with all layers before the step ``since``; the allocator's most requested bytes of each step."""
    (model, step, optimizer), peaks = training, []
    for number in range(STEPS):
        model.path = paths[number % len(paths) if number >= since else 0]
        torch.cuda.reset_peak_memory_stats(WHERE)
        optimizer.zero_grad(set_to_none=True)
        loss = step()
        loss.backward()
        optimizer.step()
        peaks.append(int(torch.cuda.memory_stats(WHERE)["requested_bytes.all.peak"]))
        turned(number)
    return peaks


@LEFT_OUT
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_sixty_steps_under_a_plan_peak_where_it_says(share: float, paths: Any) -> None:
    profile = CASE.profile()
    plan = poochplan.plan(profile, _budget(profile, share), time_limit_s=2, on="allocated")
    decisions = {value.decision for value in plan.values}
    assert decisions - {Decision.KEEP}
    training = CASE.fresh()
    with poochplan.apply(plan, training[0], profile=profile) as session:
        peaks = _turns(training, paths)
        report = session.report()
    assert report.steps_followed == STEPS
    assert report.total.fallbacks == 0
    assert max(peaks) <= plan.budget_bytes
    assert abs(max(peaks) - plan.prediction.peak_bytes) <= plan.prediction.peak_bytes // 100


@LEFT_OUT
def test_sixty_steps_under_auto_stay_within_its_budget_once_they_are_planned(paths: Any, tmp_path: Path) -> None:
    profile, training = CASE.profile(), CASE.fresh()
    model, _, optimizer = training
    budget = _budget(profile, 0.5)
    options: dict[str, Any] = {"cache": tmp_path, "link": LINK, "time_limit_s": 0.5, "quiet": True, "on": "allocated"}
    with poochplan.auto(model, optimizer, budget=budget, **options) as session:

        def turned(number: int) -> None:
            if number == PLANNED_BY:
                session.wait_until_planned(60)

        peaks = _turns(training, paths, turned, since=PLANNED_BY + 5)
        report = session.report()
    assert report.steps_followed > STEPS - PLANNED_BY - 5
    assert max(peaks[PLANNED_BY + 5 :]) <= budget


def test_the_audit_compares_on_the_device_and_finds_nothing_where_nothing_differs() -> None:
    profile, training = CASE.profile(), CASE.fresh()
    plan = poochplan.plan(profile, _budget(profile, 0.5), time_limit_s=2, on="allocated")
    with poochplan.apply(plan, training[0], on_audit="error") as session:
        _turns(training, PATHS[:1])
        assert session.report().steps_followed == STEPS


def test_a_session_that_rests_reads_its_peaks_and_wakes_for_a_larger_one(tmp_path: Path) -> None:
    profile, training = CASE.profile(), CASE.fresh()
    model, step, optimizer = training
    options: dict[str, Any] = {"cache": tmp_path, "link": LINK, "time_limit_s": 0.5, "quiet": True, "on": "allocated"}
    budget = profile.in_core_peak_bytes + 8 * MIB
    with poochplan.auto(model, optimizer, budget=budget, on_over_budget="warn", **options) as session:
        _turns(training, PATHS[:1], lambda number: session.wait_until_planned(60) if number == PLANNED_BY else None)
        assert session._attachment.is_resting
        assert session.report().last_step.peak_bytes == pytest.approx(profile.in_core_peak_bytes, rel=0.02)
        beside = torch.empty(64 * MIB, dtype=torch.uint8, device=WHERE)
        for _ in range(3):
            step().backward()
            optimizer.step()
        assert not session._attachment.is_resting
        assert beside.nbytes == 64 * MIB


def test_a_value_is_read_back_at_once_with_the_bytes_that_went_out() -> None:
    device = CudaDevice(WHERE)
    device.reserve_host(8 * MIB)
    content = torch.arange(5 * MIB, dtype=torch.uint8)
    storage = content.to(WHERE).untyped_storage()
    copy_out(device, storage, 4096).wait()
    device.synchronize()
    back = device.allocate(storage.nbytes())
    device.read(back, 4096)
    assert torch.equal(torch.empty(0, dtype=torch.uint8, device=WHERE).set_(back).cpu(), content)
    device.close()


def test_no_gap_of_launching_counts_as_an_ops_time() -> None:
    """Where an op is queued, the device is behind the launching thread: it has not come to the mark before the op."""
    clock, one = DeviceClock(WHERE), torch.zeros(8, device=WHERE)

    def reached_early() -> int:
        found, marks = 0, []
        for _ in range(1000):
            begin = clock.begin()
            found += begin.query()
            one.add_(1)
            marks.append((begin, clock.end()))
        clock.synchronize()
        assert all(clock.seconds(*pair) > 0 for pair in marks)
        return found

    assert min(reached_early() for _ in range(5)) == 0  # other processes may hold this one up


PROGRAM = """
import json, sys, time, warnings
import torch, poochplan
from poochplan.formats.plan import Plan
from tests.nullgpu.test_on_null_gpu import CASE, WHERE

plan, training, found = Plan.load(sys.argv[1]), CASE.fresh(), {}
model, step, optimizer = training
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
        with poochplan.apply(plan, model) as session:
            for _ in range(4):
                optimizer.zero_grad(set_to_none=True)
                step().backward()
                optimizer.step()
            found["followed"] = session.report().steps_followed
            found["fallbacks"] = {str(kind): count for kind, count in session.report().total.fallback_kinds.items()}
    except (torch.OutOfMemoryError, OSError, poochplan.PoochError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found["notes"] = list(getattr(error, "__notes__", ()))
found["said"] = [str(one.message) for one in said]
print(json.dumps(found))
time.sleep(1)  # autograd's device thread may still drop an object of torch's, which aborts an interpreter that ends
"""


def _run_with(plan: Plan, folder: Path, **settings: int) -> dict[str, Any]:
    """What four steps under the plan do on a machine with these limits."""
    plan.save(folder / "plan.json")
    environment = os.environ | {f"NULLGPU_{name}": str(number) for name, number in settings.items()}
    command = [sys.executable, "-c", PROGRAM, str(folder / "plan.json")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def swapping() -> Plan:
    plan = random_plan(CASE.profile(), 0, (0, 1, 0))
    assert any(value.decision is Decision.SWAP for value in plan.values)
    return plan


def test_a_card_that_is_too_small_ends_in_one_error_that_says_where(swapping: Plan, tmp_path: Path) -> None:
    found = _run_with(swapping, tmp_path, BYTES=26 * MIB)  # five of the step's tensors, and the weights
    assert found["error"].startswith("OutOfMemoryError")
    assert found["notes"][0].startswith("poochplan: out of memory in a step that follows the plan, in ")


@pytest.mark.parametrize("mebibytes", [0, 4])
def test_where_pinning_is_refused_values_go_to_pageable_memory_and_one_line_says_so(
    mebibytes: int, swapping: Plan, tmp_path: Path
) -> None:
    found = _run_with(swapping, tmp_path, PINNED_BYTES=mebibytes * MIB)
    assert "error" not in found
    assert (found["followed"], found["fallbacks"]) == (4, {})
    assert len([one for one in found["said"] if "could not be pinned" in one]) == 1
