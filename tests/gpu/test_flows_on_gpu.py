"""The ways to use a GPU, each once: profiles of every mode, plans made anew, callbacks, ranks, the commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import poochplan
from poochplan.cli import main
from poochplan.errors import BudgetExceededError
from poochplan.planner.planning import smallest_budget
from tests.gpu.cases import CASES, PLANNED_BY, WHERE, Made, turns_until_planned
from tests.gpu.conftest import ON_A_GPU
from tests.online.caches import empty_cache
from tests.runtime.nets import LINK, TORCH, Case, equal, train
from tests.runtime.random_plans import random_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WHERE.type != "cuda", reason="about CUDA alone"),
]
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


def test_a_profile_of_mode_swap_all_is_that_of_the_step_and_its_plans_are_exact() -> None:
    case = CASES["residual"]
    swapped, in_core = case.new_profile(mode="swap-all"), case.new_profile()
    assert [value.name for value in swapped.values] == [value.name for value in in_core.values]
    assert [value.unreplayable for value in swapped.values] == [value.unreplayable for value in in_core.values]
    assert equal(train(case, 2)[0], train(case, 2, random_plan(swapped, 2))[0])


def test_a_step_that_calls_backward_itself_is_profiled_where_it_runs() -> None:
    case = CASES["embedding"]
    model, step, optimizer = case.fresh()

    def whole() -> None:
        optimizer.zero_grad(set_to_none=True)
        step().backward()
        optimizer.step()

    profile = poochplan.profile(
        whole, model=model, optimizer=optimizer, backward="inside", link=LINK, warmup=1, iterations=1
    )
    assert profile.device.kind == "cuda"
    assert equal(train(case, 2)[0], train(case, 2, random_plan(profile, 2))[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # that a step took more than its budget
@pytest.mark.parametrize("what", ["replan", "error"])
def test_what_lives_beside_the_step_is_planned_anew_or_is_an_error(what: str) -> None:
    case = CASES["large"]
    profile = case.new_profile()
    smallest = smallest_budget(profile)
    budget = smallest + 9 * (profile.in_core_peak_bytes - smallest) // 10
    plan = poochplan.plan(profile, budget, evaluations=100)
    model, step, optimizer = case.fresh()
    beside = torch.empty((plan.budget_bytes - plan.prediction.peak_bytes) + (4 << 20), dtype=torch.uint8, device=WHERE)
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


def test_a_trainers_callback_trains_with_the_bits_of_plain_training(tmp_path: Path) -> None:
    hf = pytest.importorskip("poochplan.integrations.hf", exc_type=ImportError)
    case = CASES["embedding"]
    in_core = train(case, PLANNED_BY + 3)[0]
    model, step, optimizer = case.fresh()
    options: dict[str, Any] = {"link": LINK, "time_limit_s": 0.5, "quiet": True, "on_over_budget": "warn"}
    callback = hf.PlanCallback(budget="80%", cache=tmp_path / "plans", **options)
    nobody: Any = None
    torch.manual_seed(1)
    callback.on_train_begin(nobody, nobody, nobody, model=model, optimizer=optimizer)
    session = callback.session
    assert session is not None
    seen = turns_until_planned(session, (model, step, optimizer), PLANNED_BY + 3)
    callback.on_train_end(nobody, nobody, nobody)
    assert equal(in_core, seen)
    assert session.report().steps_followed > 0


def _compiled_in_part(backend: str) -> Case:
    def make() -> Made:
        layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
        model, rows = torch.nn.Sequential(*layers).to(WHERE), torch.randn(256, 64).to(WHERE)
        layers[1].compile(backend=backend)
        return model, lambda model: model(rows).square().mean()

    return Case(make)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("eager", marks=pytest.mark.deep)])
def test_a_compiled_region_is_one_op_and_its_values_are_swapped_and_recomputed(backend: str) -> None:
    """By what the compiler makes of it before it makes code, which it makes for no stand-in."""
    if TORCH >= (2, 14) and not ON_A_GPU:
        pytest.skip("torch 2.14 begins with a node on a device's own stream, which the stand-in has not: it aborts")
    case = _compiled_in_part(backend)
    profile = case.new_profile()
    assert [op.name for op in profile.ops if "compiled" in op.name][:1] == ["compiled_region"]
    planned, report = train(case, 2, random_plan(profile, 0))
    assert equal(train(case, 2)[0], planned)
    assert report is not None
    assert report.total.fallbacks == 0
    assert report.last_step.out_bytes > 0


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_model_of_data_parallel_training_follows_its_plan() -> None:
    """Its buckets are host memory here: the reducer is below what the stand-in sees."""
    case = CASES["residual"]
    plan = random_plan(case.profile(), 2)
    seen = []
    for is_planned in (False, True):
        model, _, _ = case.fresh()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        images, labels = torch.ones(4, 8, 32, 32).to(WHERE), torch.zeros(4, dtype=torch.long).to(WHERE)
        torch.manual_seed(1)
        with poochplan.apply(plan, model) if is_planned else contextlib.nullcontext() as session:
            for _ in range(2):
                wrapped.zero_grad(set_to_none=True)
                torch.nn.functional.cross_entropy(wrapped(images), labels).backward()
                seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        if session is not None:
            assert session.report().total.fallbacks == 0
            assert session.report().last_step.out_bytes > 0
    assert equal(seen[:2], seen[2:])


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
    assert "reserved" in json.dumps(told)
