"""Every ready workload, made small, at one of three budgets: bitwise gradients, the peak within it and as predicted.

The peak is metered by ``tests/live_bytes.py``, which shares no code with the package. ``benchmarks/exactness.py`` does
the same at full size with torch's own memory tracker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import poochplan
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.runtime.run_report import Report
from poochplan.workload import Workload, load_workload
from tests.live_bytes import LiveBytes

EVALUATIONS = 100
"""The claims hold of any plan; the best one would take longer to find."""
STATE = ("state",)
"""It stays on the device: the meter here sees tensors in the host tier too."""
CONFIGS = Path(__file__).parents[2] / "configs"
_TEXT = {"batch_size": "4", "sequence_length": "64", "layers": "3", "width": "64", "heads": "2", "vocabulary": "512"}
SMALL = {
    "resnet50": {"batch_size": "4", "image_size": "64", "hidden_sizes": "[32, 32, 64, 64]", "depths": "[1, 2, 1, 1]"},
    "gpt2": _TEXT,
    "bert": _TEXT,
    "unet3d": {"side": "32", "features": "[8, 8, 16, 16, 16, 8]"},
    "seq2seq": {"batch_size": "8", "sequence_length": "48", "width": "64"},
    "seq2seq_steps": {"batch_size": "8", "sequence_length": "12", "width": "64"},
    "char_rnn": {"batch_size": "8", "sequence_length": "64", "width": "64"},
}
STEPS = 3
_MIB = 1 << 20


def _fresh(name: str) -> Workload:
    torch.manual_seed(0)
    return load_workload(str(CONFIGS / f"{name}.toml"), SMALL[name]).workload


@cache
def _profile(name: str) -> Profile:
    workload = _fresh(name)
    return poochplan.profile(
        workload.step, model=workload.model, optimizer=workload.optimizer, iterations=2, throttle="400MB/s"
    )


def _train(name: str, plan: Plan | None) -> tuple[list[list[torch.Tensor]], list[int], Report | None]:
    """Loss, gradients and buffers of each step, its metered peak, and the session's report."""
    workload = _fresh(name)
    torch.manual_seed(1)
    seen, peaks, loss = list[list[torch.Tensor]](), list[int](), None
    with contextlib.ExitStack() as stack:
        session = plan and stack.enter_context(poochplan.apply(plan, workload.model, meter="never"))
        for _ in range(STEPS):
            workload.optimizer.zero_grad(set_to_none=True)
            state = [t for entries in workload.optimizer.state.values() for t in entries.values()]
            before = (*workload.model.parameters(), *workload.model.buffers(), *state)
            with LiveBytes(*before, *([] if loss is None else [loss])) as meter:
                loss = workload.step()
                loss.backward()
                workload.optimizer.step()
            peaks.append(meter.peak)
            gradients = [p.grad.clone() for p in workload.model.parameters() if p.grad is not None]
            seen.append([loss.detach().clone(), *gradients, *(b.clone() for b in workload.model.buffers())])
    return seen, peaks, session and session.report()


@cache
def _in_core(name: str) -> list[list[torch.Tensor]]:
    return _train(name, None)[0]


def each() -> Iterator[Any]:
    """Every workload at three budgets; by day the smallest one and the next one take turns."""
    for number, name in enumerate(SMALL):
        for place, room in enumerate((0, 0.25, 0.5)):
            yield pytest.param(name, room, marks=[pytest.mark.deep] if place != number % 2 else [])


@pytest.mark.parametrize(("name", "room"), [*each()])
def test_gradients_are_bitwise_and_the_peak_is_within_budget_and_as_predicted(name: str, room: float) -> None:
    """``room``: of the bytes between the smallest feasible budget and the in-core peak, the share that is there."""
    profile = _profile(name)
    smallest = smallest_budget(profile, without=STATE)
    budget = int(smallest + room * (profile.in_core_peak_bytes - smallest))
    plan = poochplan.plan(profile, budget, evaluations=EVALUATIONS, without=STATE)
    seen, peaks, report = _train(name, plan)

    reference = _in_core(name)
    assert all(torch.equal(x, y) for a, b in zip(reference, seen, strict=True) for x, y in zip(a, b, strict=True))
    assert report.total.fallbacks == 0, report.total.fallback_reasons
    assert max(peaks) <= budget
    found = plan.prediction
    first_bytes = found.first_step_peak_bytes + found.live_peak_bytes - found.peak_bytes  # this meter sees no workspace
    predicted = [first_bytes, *[found.live_peak_bytes] * (STEPS - 1)]
    for metered, expected in zip(peaks, predicted, strict=True):
        assert abs(metered - expected) <= 0.01 * metered + _MIB


def test_one_plan_mixes_all_three_decisions() -> None:
    measured = _profile("gpt2")
    # Ops of one length: what is recomputed must not depend on how busy the machine is.
    ops = tuple(msgspec.structs.replace(op, duration_s=3e-5) for op in measured.ops)
    profile = msgspec.structs.replace(measured, ops=ops, runtime=None)
    budget = smallest_budget(profile, arena="off", without=STATE)
    plan = poochplan.plan(profile, budget, evaluations=EVALUATIONS, arena="off", without=STATE)
    decisions = {value.decision for value in plan.values}
    assert decisions == set(Decision)
