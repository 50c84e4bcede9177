"""What a session does on CUDA alone: its peaks, its streams, its stopwatches, and the graphs that it refuses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import poochplan
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.profiler.trials.machine_facts import measure_runtime
from poochplan.runtime.devices.cuda import CudaDevice, hard_cap
from poochplan.runtime.devices.transfers import copy_out
from tests.cuda_rules.machine import MACHINE
from tests.gpu.cases import ABOUT_CUDA, CASES, WHERE
from tests.runtime.random_plans import random_plan

pytestmark = ABOUT_CUDA
MIB = 1 << 20


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(CASES["residual"].profile(), 0, (0, 1, 0))


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    opened = CudaDevice(WHERE)
    opened.reserve_host(MIB)
    yield opened
    opened.close()


def test_a_cap_is_for_the_current_gpu_where_no_index_is_given_and_more_is_out_of_memory() -> None:
    where = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_per_process_memory_fraction(where)
    torch.cuda.empty_cache()
    with hard_cap(torch.device("cuda"), torch.cuda.memory_reserved(where) + 64 * MIB):
        assert torch.cuda.get_per_process_memory_fraction(where) < before
        assert torch.empty(16 * MIB, dtype=torch.uint8, device=where).nbytes == 16 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 * MIB, dtype=torch.uint8, device=where)
    assert torch.cuda.get_per_process_memory_fraction(where) == before
    assert torch.empty(512 * MIB, dtype=torch.uint8, device=where).nbytes == 512 * MIB


@pytest.mark.parametrize("meter", ["first-steps", "never"])
def test_the_allocators_peaks_begin_with_the_session_metered_or_not(plan: Plan, meter: str) -> None:
    model, step, _ = CASES["residual"].fresh()
    large = torch.empty(256 * MIB, dtype=torch.uint8, device=WHERE)
    del large
    with poochplan.apply(plan, model, meter=meter) as session:  # type: ignore[arg-type]
        step().backward()
        memory = session.report().memory
    assert memory is not None
    assert 0 < memory.allocated_bytes < 256 * MIB


def test_a_stream_that_nothing_of_today_is_of_is_not_waited_for(device: CudaDevice) -> None:
    side = torch.cuda.Stream(WHERE)
    with torch.cuda.stream(side):
        home = device.compute
        copy = copy_out(device, device.allocate(MIB), 0)
    assert side.cuda_stream in device.compute.seen
    del home
    gc.collect()
    assert side.cuda_stream in device.compute.seen  # the copy's buffer may be of it
    copy.wait()
    del copy
    assert list(device.compute.seen) == [torch.cuda.current_stream(WHERE).cuda_stream]


@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0)])
def test_a_saved_value_belongs_to_the_stream_on_which_it_was_saved(weights: tuple[int, int, int]) -> None:
    case = CASES["two_streams_wait"]
    followed, (model, step, _) = random_plan(case.profile(), 0, weights), case.fresh()
    saved_on: list[int] = []
    with poochplan.apply(followed, model, meter="never") as session:
        for _ in range(2):
            loss, homes = step(), set[int]()
            for record in session._attachment.engine.tape.registered():
                value: Any = record.value() if record.value is not None else None
                if value is not None and value.home is not None:
                    homes.add(value.home.stream.cuda_stream)
            loss.backward()  # type: ignore[no-untyped-call]
            saved_on.append(len(homes))
    assert saved_on == [2, 2], "what forward runs on the side stream is of that"


def test_new_buffers_are_not_filled_where_algorithms_are_deterministic(device: CudaDevice) -> None:
    assert torch.are_deterministic_algorithms_enabled()
    filled = MACHINE[-1].filled_bytes if MACHINE else 0
    storage = device.allocate(MIB)
    assert storage.nbytes() == MIB
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if MACHINE:
        assert MACHINE[-1].filled_bytes == filled
        torch.empty(MIB, device=WHERE)
        assert MACHINE[-1].filled_bytes > filled  # and a user's are


def test_a_stopwatch_tells_what_the_stream_spent_once_that_has_passed(device: CudaDevice) -> None:
    watch = device.stopwatch()
    assert watch is not None
    side = torch.cuda.Stream(WHERE)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        done = side.record_event()
    for _ in range(2):
        with watch.running():
            torch.cuda.current_stream(WHERE).wait_event(done)
    assert watch.take() == 0  # nothing has passed, and nobody waits for it
    device.synchronize()
    seconds = watch.take()
    assert 1e-3 < seconds < 0.5
    assert watch.take() == 0


def test_a_report_tells_what_the_compute_stream_spent_in_metered_steps(plan: Plan) -> None:
    replaying = random_plan(CASES["residual"].profile(), 0, (0, 1, 1))
    model, step, _ = CASES["residual"].fresh()
    with poochplan.apply(replaying, model) as session:
        step().backward()
        torch.cuda.synchronize()
        metered = session.report().last_step
        assert metered.replay_s > 0
        assert 0 < metered.stall_s < 1
        step().backward()
        step().backward()
        step().backward()  # the first that is not metered
        torch.cuda.synchronize()
        unmetered = session.report().last_step
        assert unmetered.replayed_values == metered.replayed_values > 0
        assert unmetered.stall_s == unmetered.replay_s == 0


@pytest.mark.deep
def test_what_the_launching_thread_takes_is_measured_on_cuda_too() -> None:
    cost = measure_runtime(WHERE).cost
    assert min(cost.launch_s, cost.handle_s, cost.swap_s, cost.record_s, cost.replay_s) > 0 or cost.unmeasured
    assert not MACHINE or MACHINE[-1].violations == []


@pytest.mark.needs("graphs", "a stream is captured")
def test_a_step_that_is_captured_as_a_graph_is_refused(plan: Plan) -> None:
    model, step, _ = CASES["residual"].fresh()
    step().backward()
    with poochplan.apply(plan, model) as session:
        with (
            pytest.raises(UsageError, match="CUDA graph: expected steps that run op by op"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            step()
        with session.away():
            step()
        step().backward()
        assert session.report().last_step.fallbacks == 0


@pytest.mark.parametrize("compiled", ["a part", "the model", "by its own compile"])
def test_a_model_compiled_to_graphs_is_refused(plan: Plan, compiled: str) -> None:
    model, _, _ = CASES["residual"].fresh()
    given: torch.nn.Module = model
    if compiled == "a part":
        model.blocks[1] = torch.compile(model.blocks[1], mode="reduce-overhead")  # type: ignore[operator, index]
    elif compiled == "the model":
        given = torch.compile(model, mode="reduce-overhead")
    else:
        model.compile(mode="reduce-overhead")
    found = "blocks.1" if compiled == "a part" else "the model"
    with pytest.raises(UsageError, match=f'without CUDA graphs, found {found} with mode="reduce-overhead"; compile'):
        with poochplan.apply(plan, given):
            raise AssertionError("it was entered")
    assert not model._forward_pre_hooks


def test_a_model_compiled_without_graphs_is_not(plan: Plan) -> None:
    model, _, _ = CASES["residual"].fresh()
    model.compile()
    with poochplan.apply(plan, model) as session:
        assert session._engine.device.kind == "cuda"
