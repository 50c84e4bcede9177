"""What the launching thread takes is measured on the GPU's own path; the GPU's clock may be the processor's."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from poochplan.formats.profile import Phase
from poochplan.profiler.live import own_costs
from poochplan.profiler.trials.machine_facts import cached_cost
from tests.nullgpu.test_on_null_gpu import CASE, WHERE

SECOND_CYCLES = 1_700_000_000
"""The null GPU's clock is one of 1.7 GHz."""


def test_a_profile_has_what_each_phase_launches_and_the_costs_of_the_model_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_costs, "SHORT_OP_S", math.inf)
    cost, apart = CASE.new_profile().runtime, cached_cost(WHERE)
    assert cost is not None
    assert apart is not None
    assert cost.phase_launch_s.keys() == {*Phase}
    assert all(0 < seconds < 1 for seconds in cost.phase_launch_s.values())
    assert apart.cost.phase_launch_s == {}
    assert (cost.swap_s, cost.fetch_s) == (apart.cost.swap_s, apart.cost.fetch_s)
    own = {
        name
        for name in ("handle_s", "record_s", "drop_s", "replay_s")
        if getattr(cost, name) != getattr(apart.cost, name)
    }
    assert own == {"handle_s", "record_s", "drop_s", "replay_s"}


def test_of_long_ops_only_launches_are_measured_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_costs, "SHORT_OP_S", 0.0)
    cost, apart = CASE.new_profile().runtime, cached_cost(WHERE)
    assert cost is not None
    assert apart is not None
    assert cost.phase_launch_s.keys() == {*Phase}
    assert (cost.record_s, cost.replay_s) == (apart.cost.record_s, apart.cost.replay_s)


OF_A_COPY = """
import torch
from poochplan.profiler.link import measure_link
link = measure_link(torch.device("cuda"), sizes=(1 << 16, 1 << 19, 1 << 22))
print(link.outward.latency_s, link.inward.latency_s)
"""


def test_a_copys_latency_is_the_gpus_and_queueing_it_is_no_part() -> None:
    environment = os.environ | {"NULLGPU_BY_PROCESSOR": "1", "NULLGPU_SECONDS": "1"}
    command = [sys.executable, "-c", OF_A_COPY]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=True)
    assert [float(latency_s) for latency_s in ran.stdout.split()] == pytest.approx([5e-6, 5e-6], rel=0.2)


PHASES = f"""
import torch
from poochplan.formats.profile import Phase
from poochplan.profiler.live.after_capture import PhaseTiming
from poochplan.profiler.live.step_function import StepFunction

weight = torch.nn.Linear(1, 1, device="cuda")
model = torch.nn.Sequential(weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
SLEEP = {SECOND_CYCLES}

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, batch):
        torch.cuda._sleep(SLEEP)
        return batch.clone()

    @staticmethod
    def backward(context, gradient):
        torch.cuda._sleep(2 * SLEEP)
        return gradient.clone()

def step():
    return Slow.apply(model(torch.ones(1, 1, device="cuda"))).sum()

with StepFunction(step, model, optimizer, torch.device("cuda")) as steps:
    steps.one_step()
    observer = steps.run(PhaseTiming(steps.context, None))
print(*(observer.seconds[phase] for phase in Phase), *(observer.launching_s[phase] for phase in Phase))
"""


def test_a_phase_that_is_launched_ahead_takes_no_time_for_its_launches() -> None:
    environment = os.environ | {"NULLGPU_BY_PROCESSOR": "1", "NULLGPU_SECONDS": "1"}
    command = [sys.executable, "-c", PHASES]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=True)
    forward_s, backward_s, optimizer_s, *launching_s = map(float, ran.stdout.split())
    assert (forward_s, backward_s) == pytest.approx((1.0, 2.0), rel=0.02)
    assert optimizer_s < launching_s[2]


PROGRAM = f"""
import time, torch
torch.cuda.synchronize()
before_s, processor_s = time.perf_counter(), time.process_time()
torch.cuda._sleep({100 * SECOND_CYCLES})
torch.cuda.synchronize()
print(time.perf_counter() - before_s, time.process_time() - processor_s)
"""


def test_by_the_processors_clock_a_wait_for_the_gpu_passes_at_once() -> None:
    environment = os.environ | {"NULLGPU_BY_PROCESSOR": "1", "NULLGPU_SECONDS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=True)
    passed_s, processor_s = map(float, ran.stdout.split())
    assert passed_s >= 100 > processor_s
