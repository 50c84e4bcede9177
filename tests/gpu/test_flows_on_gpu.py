"""The ways to use a GPU: profiles of every mode, plans made anew, ``auto``, callbacks, ranks, the commands, traces, and
memory that runs out. By day each with one network. Bits are those of plain training, and no step takes more than
predicted.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import poochplan
from poochplan.cli import main
from poochplan.errors import BudgetExceededError
from poochplan.formats.plan import Decision
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.report.timeline import write_trace
from poochplan.runtime.devices.cuda import hard_cap
from poochplan.tracing import traced_step
from poochplan.units import format_bytes
from poochplan.workload import Workload
from tests.cli.trace_reader import read_trace
from tests.gpu.cases import (
    ABOUT_CUDA,
    BY_DAY,
    CASES,
    OF_FLOWS,
    ON_A_GPU,
    PLANNED_BY,
    WHERE,
    Made,
    case_of,
    each,
    in_host_memory,
    planned,
    reference,
    same_bits,
    takes_what_is_predicted,
    turns_until_planned,
)
from tests.online.caches import empty_cache
from tests.runtime.nets import LINK, TORCH, Case, followed
from tests.runtime.random_plans import random_plan

pytestmark = ABOUT_CUDA
WORKLOAD = """
import torch

import poochplan


def small(device: str = "cpu") -> poochplan.Workload:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1)).to(device)
    rows = torch.randn(256, 64).to(device)
    return poochplan.Workload(model, lambda: model(rows).square().mean(), torch.optim.AdamW(model.parameters()))
"""


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with empty_cache(tmp_path_factory.mktemp("user")):
        yield


@pytest.mark.parametrize("name", each(OF_FLOWS, ("residual",)))
def test_a_profile_of_mode_swap_all_is_that_of_the_step_and_its_plans_are_exact(name: str) -> None:
    case = case_of(name)
    swapped, in_core = case.new_profile(mode="swap-all"), case.profile()
    assert [value.name for value in swapped.values] == [value.name for value in in_core.values]
    assert [value.unreplayable for value in swapped.values] == [value.unreplayable for value in in_core.values]
    followed(case, random_plan(swapped, 2), wanted=reference(case, 2))
    takes_what_is_predicted(case, swapped)


def _profile_inside(case: Case) -> Profile:
    model, step, optimizer = case.fresh()
    held: list[torch.Tensor] = []

    def whole() -> None:
        optimizer.zero_grad(set_to_none=True)
        held[:] = [step()]  # until the next one, as loops hold their loss
        held[0].backward()
        optimizer.step()

    options: dict[str, Any] = {"link": LINK, "warmup": 1, "iterations": 1}
    return poochplan.profile(whole, model=model, optimizer=optimizer, backward="inside", **options)


@pytest.mark.parametrize("name", each(OF_FLOWS, ("embedding",)))
def test_a_step_that_calls_backward_itself_is_profiled_where_it_runs(name: str) -> None:
    case = case_of(name)
    profile = _profile_inside(case)
    assert profile.device.kind == "cuda"
    followed(case, random_plan(profile, 2), wanted=reference(case, 2))
    takes_what_is_predicted(case, profile)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # that a step took more than its budget
@pytest.mark.parametrize("what", ["replan", "error"])
@pytest.mark.parametrize(
    "name",
    [
        *each(("large", "residual"), ("large",)),
        pytest.param(
            "recurrent",
            marks=[pytest.mark.rest, pytest.mark.needs("cuDNN", "without it the step takes less than predicted")],
        ),
    ],
)
def test_what_lives_beside_the_step_is_planned_anew_or_is_an_error(name: str, what: str) -> None:
    case = CASES[name]
    profile = case.profile()
    smallest = smallest_budget(profile)
    room = profile.in_core_peak_bytes - smallest
    budget = smallest + 9 * room // 10
    plan = poochplan.plan(profile, budget, evaluations=100, on="allocated")
    model, step, optimizer = case.fresh()
    beside_bytes = (plan.budget_bytes - plan.prediction.peak_bytes) + room // 5
    beside = torch.empty(beside_bytes, dtype=torch.uint8, device=WHERE)
    ended = pytest.raises(BudgetExceededError) if what == "error" else contextlib.nullcontext()
    with ended, poochplan.apply(plan, model, on_over_budget=what, profile=profile) as session:  # type: ignore[arg-type]
        for _ in range(4):
            optimizer.zero_grad(set_to_none=True)
            step().backward()
            optimizer.step()
    report = session.report()
    if what == "replan":
        assert report.last_step.peak_bytes is not None
        assert beside.nbytes < report.last_step.peak_bytes <= budget
        assert report.total.fallbacks == 0


OF_LOOPS: dict[str, Any] = {
    "budget": "95%",  # the smallest of attention and of checkpoints is 90%
    "on": "allocated",  # such small networks reserve one page, whatever is planned
    "link": LINK,
    "time_limit_s": 0.5,
    "quiet": True,
    "on_over_budget": "warn",
}


@pytest.mark.parametrize("name", each(BY_DAY, ("embedding",)))
def test_auto_studies_plans_and_follows_with_the_bits_of_plain_training(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    in_core = in_host_memory(reference(case, PLANNED_BY + 3))
    model, step, optimizer = case.fresh()
    torch.manual_seed(1)
    with poochplan.auto(model, optimizer, cache=tmp_path, **OF_LOOPS) as session:
        seen = turns_until_planned(session, (model, step, optimizer), PLANNED_BY + 3)
    assert same_bits(in_core, seen)


@pytest.mark.parametrize("name", each(BY_DAY, ("residual",)))
def test_a_trainers_callback_trains_with_the_bits_of_plain_training(name: str, tmp_path: Path) -> None:
    hf = pytest.importorskip("poochplan.integrations.hf", exc_type=ImportError)
    case = case_of(name)
    in_core = in_host_memory(reference(case, PLANNED_BY + 3))
    model, step, optimizer = case.fresh()
    callback = hf.PlanCallback(cache=tmp_path / "plans", **OF_LOOPS)
    nobody: Any = None
    torch.manual_seed(1)
    callback.on_train_begin(nobody, nobody, nobody, model=model, optimizer=optimizer)
    assert callback.session is not None
    seen = turns_until_planned(callback.session, (model, step, optimizer), PLANNED_BY + 3)
    callback.on_train_end(nobody, nobody, nobody)
    assert same_bits(in_core, seen)


def _compiled_in_part(backend: str) -> Case:
    def make() -> Made:
        layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
        model, rows = torch.nn.Sequential(*layers).to(WHERE), torch.randn(256, 64).to(WHERE)
        layers[1].compile(backend=backend)
        return model, lambda model: model(rows).square().mean()

    return Case(make)


@pytest.mark.parametrize(
    "backend",
    [
        *each(("aot_eager", "eager"), ("aot_eager",)),
        pytest.param("inductor", marks=[pytest.mark.rest, pytest.mark.needs("Triton", "Inductor makes kernels by it")]),
    ],
)
def test_a_compiled_region_is_one_op_and_its_values_are_swapped_and_recomputed(backend: str) -> None:
    """On the stand-in by what the compiler makes of it before it makes code."""
    if backend == "inductor" and not ON_A_GPU:
        pytest.skip("it makes no code for the stand-in")
    if TORCH >= (2, 14) and not ON_A_GPU:
        pytest.skip("torch 2.14 begins with a node on a device's own stream, which the stand-in has not: it aborts")
    case = _compiled_in_part(backend)
    profile = case.new_profile()
    assert [op.name for op in profile.ops if "compiled" in op.name][:1] == ["compiled_region"]
    report = followed(case, random_plan(profile, 0), wanted=reference(case, 2))
    assert report.last_step.out_bytes > 0
    takes_what_is_predicted(case, profile)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.needs("numerics", "ranks compare the number of parameters that they read from the device")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", each(BY_DAY, ("residual",)))
def test_a_model_of_data_parallel_training_follows_its_plan(name: str) -> None:
    """Its buckets are host memory on the stand-in: the reducer is below what that sees."""
    case_of(name)
    case = Case(lambda: _data_parallel(CASES[name].make()))
    profile = case.new_profile()
    report = followed(case, random_plan(profile, 2), wanted=reference(case, 2))
    assert report.last_step.out_bytes + report.last_step.replayed_values > 0
    takes_what_is_predicted(case, profile)


def _data_parallel(made: Made) -> Made:
    model, loss_of = made
    return torch.nn.parallel.DistributedDataParallel(model), loss_of


@pytest.mark.needs("numerics", "the command compares what two in-core runs compute")
def test_the_commands_profile_plan_and_check_a_run_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(WORKLOAD)
    assert main(["profile", "mine.py:small", "--device", "cuda", "--iterations", "1", "-o", "gpu.json"]) == 0
    profile = json.loads(Path("gpu.json").read_text())
    assert profile["device"]["kind"] == "cuda"
    assert profile["switches"]["benchmark"] == "False"
    assert main(["plan", "gpu.json", "--budget", "80%", "--policy", "greedy", "-o", "plan.json"]) == 0
    capsys.readouterr()
    arguments = ["--plan", "plan.json", "--check", "--cap", "--margin", "64MiB", "--steps", "2", "--json"]
    assert main(["run", "mine.py:small", *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["reserved_peak_bytes"] >= told["allocated_peak_bytes"] > 0
    assert 0 < told["measured_peak_bytes"] <= told["budget_bytes"]  # the audit takes of what is above the prediction


def test_a_trace_has_each_planned_copy_on_its_link_and_replays_beside_them(tmp_path: Path) -> None:
    plan = random_plan(CASES["residual"].profile(), 3, (1, 1, 1))
    traced = traced_step(lambda: Workload(*CASES["residual"].fresh()), plan)
    trace = read_trace(write_trace(traced, tmp_path / "trace.json"))
    swapped = Counter(value.name for value in plan.values if value.decision is Decision.SWAP)
    assert swapped
    assert Counter(one.of for one in trace.tracks["out-link"]) == swapped
    assert {one.of for one in trace.tracks["in-link"]} <= set(swapped)
    assert [one.name for one in trace.tracks["step"]] == ["forward", "backward", "optimizer"]
    assert {"stall", "replay"} <= {one.name for one in trace.tracks["compute"]}
    assert max(size for _, size in trace.counters["live bytes"]) == traced.memory.peak_bytes > 0
    assert trace.other["fallbacks"] == 0


def test_a_step_that_runs_out_of_memory_while_it_is_profiled_is_profiled_swapping() -> None:
    case = CASES["large"]
    room_bytes = case.profile().in_core_peak_bytes * 3 // 4
    gc.collect()
    torch.cuda.empty_cache()
    with hard_cap(WHERE, torch.cuda.memory_reserved() + room_bytes):
        profile = case.new_profile(mode="auto")
    assert profile.mode == "swap-all"
    assert any("ran out of the device's memory" in note for note in profile.notes)
    assert profile.in_core_peak_bytes > room_bytes
    followed(case, random_plan(profile, 2), wanted=reference(case, 2))
    takes_what_is_predicted(case, profile)


def test_a_planned_step_that_runs_out_of_memory_says_where_and_who_holds_it() -> None:
    case = CASES["large"]
    profile = case.profile()
    plan = planned(profile)
    model, step, _ = case.fresh()
    beside = torch.empty(48 << 20, dtype=torch.uint8, device=WHERE)
    torch.cuda.empty_cache()
    cap_bytes = torch.cuda.memory_reserved() + plan.prediction.peak_bytes // 2
    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        poochplan.apply(plan, model, profile=profile, cap_bytes=cap_bytes),
    ):
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
