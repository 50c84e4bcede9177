"""Loops that step without an optimizer of torch, make new optimizers, fork workers or vary: planned, and not slowed.
None loads solvers, tables or compilers: planning is another process's.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poochplan
from poochplan.online.plan_cache import optimizers_of
from poochplan.runtime.active_plan import ActivePlan
from tests.online.runs import QUICK, opened, planning, run_auto, run_plain
from tests.online.trainings import Losses, Training, Turn, blocks, plain, stepping
from tests.processes import python
from tests.runtime.besides import plain_step
from tests.runtime.nets import CASES
from tests.runtime.served import needs_compiler

BATCH = torch.linspace(-1, 1, 256 * 64).reshape(256, 64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))


def updated(model: nn.Module, update: Callable[[], object]) -> Training:
    """Without an optimizer that ``auto`` is given."""
    return stepping(model, lambda _: model(BATCH).square().mean(), update=update)


def plain_of(model: nn.Module, rows: torch.Tensor = BATCH) -> Training:
    return stepping(model, lambda _: model(rows).square().mean(), torch.optim.SGD(model.parameters(), lr=0.01))


def by_hand() -> Training:
    model = network()

    @torch.no_grad()
    def update() -> None:
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None

    return updated(model, update)


def by_master_weights() -> Training:
    model = network()
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.01)

    def update() -> None:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    return updated(model, update)


def in_hooks_of_backward() -> Training:
    model = network()
    optimizers = {one: torch.optim.SGD([one], lr=0.01) for one in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return updated(model, lambda: None)


def lazy_layers() -> Training:
    """They have no weights before the first step."""
    return plain_of(nn.Sequential(*(layer for _ in range(4) for layer in (nn.LazyLinear(64), nn.GELU()))))


def transforming() -> Training:
    """Beside its steps, gradients of single rows, and a loss by other weights."""
    model = network()
    training = plain_of(model)

    def loss_of(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (row[None],)).square().mean()

    def turn(inner: Turn, number: int) -> Losses:
        losses = list(inner(number))
        weights = {name: one.detach() for name, one in model.named_parameters()}
        if number % 2:
            each = torch.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(weights, BATCH[:8])
            losses += [one.norm().item() for one in each.values()]
        _, loss = torch.func.grad_and_value(loss_of)(weights, BATCH[0])
        return [*losses, loss.item()]

    return training.each(turn)


@pytest.mark.parametrize(
    ("make", "budget"),
    [
        (by_hand, "60%"),
        (by_master_weights, "60%"),
        (in_hooks_of_backward, "70%"),
        (lazy_layers, "80%"),
        (transforming, "70%"),
    ],
)
def test_a_loop_whose_optimizer_or_weights_are_not_seen_or_that_calls_its_model_in_transforms_has_one_plan(
    make: Callable[[], Training], budget: str, tmp_path: Path
) -> None:
    found = run_auto(make, budget, tmp_path, 32, is_metered=False)
    assert found.equals(run_plain(make, 32, is_metered=False))
    assert len(found.session.plans) == len(found.session._source.loop.kinds) == 1
    assert found.session.report().steps_followed > 0
    assert found.session.total.fallbacks == 0
    assert not found.session._source.loop.kinds.alike


def test_a_new_optimizer_for_each_task_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    model, made = network(), list[weakref.ref[torch.optim.Optimizer]]()
    with poochplan.auto(model, budget="70%", cache=tmp_path, **QUICK) as session:
        for _ in range(4):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            made.append(weakref.ref(optimizer))
            for _ in range(8):
                plain_step(model, optimizer, BATCH)
            del optimizer
            gc.collect()
            session.wait_until_planned(60)
        assert [reference() for reference in made] == [None] * 4
        assert len(session._source.loop.kinds) == len(session.plans) == 1


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_loop_that_trains_by_transforms_alone_is_told_once_that_it_is_not_seen(
    has_optimizer: bool, tmp_path: Path
) -> None:
    model = network()
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (BATCH,)).square().mean()

    with (
        pytest.warns(RuntimeWarning, match="sees no step of Sequential.*torch.func.grad has no such backward") as told,
        poochplan.auto(model, optimizer, budget="60%", cache=tmp_path, **QUICK),
    ):
        for _ in range(5):
            gradients = torch.func.grad(loss_of)(weights)
            for name, weight in weights.items():
                weight.grad = gradients[name].detach()
            if has_optimizer:
                optimizer.step()
    assert len(told) == 1


def test_a_loop_that_updates_several_times_by_one_step_is_seen(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(), poochplan.auto(model, optimizer, budget="60%", cache=tmp_path, **QUICK):
        warnings.simplefilter("error")
        for _ in range(3):
            model(BATCH).square().mean().backward()
            for _ in range(5):
                optimizer.step()


def failing(*_: object) -> Any:
    raise KeyError("a fault of the study's")


@needs_compiler
@pytest.mark.parametrize("part", ["link", "fits", "has_arena", "with_costs"])
def test_a_study_that_fails_is_told_once_and_the_loop_trains_on(part: str, tmp_path: Path) -> None:
    training = plain_of(network())
    with (
        pytest.warns(RuntimeWarning, match="no plan is made for some of the steps: KeyError: .*study's") as told,
        poochplan.auto(training.models, training.optimizers, budget="70%", cache=tmp_path, **QUICK) as session,
    ):
        observer: Any = session._observer
        observer._study_options = replace(observer._study_options, **{part: failing})
        losses = [training.turn(number) for number in range(14)]
    assert len(told) == 1
    again = plain_of(network())
    assert losses == [again.turn(number) for number in range(14)]


def test_a_model_is_pickled_and_copied_in_the_midst_of_any_step(tmp_path: Path) -> None:
    model, hooked = network(), list[nn.Module]()

    def forward(_: int) -> torch.Tensor:
        loss: torch.Tensor = model(BATCH).square().mean()
        for one in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            hooked.extend(layer for layer in one.modules() if layer._forward_pre_hooks or layer._forward_hooks)
        return loss

    training = stepping(model, forward, torch.optim.SGD(model.parameters(), lr=0.01))
    with poochplan.auto(training.models, training.optimizers, budget="90%", cache=tmp_path, **QUICK) as session:
        for number in range(14):
            training.turn(number)
        assert session.profiles
    assert not hooked


def test_a_loop_on_another_thread_than_the_sessions_is_told_so(tmp_path: Path) -> None:
    training = plain_of(network())
    loop = threading.Thread(target=lambda: [training.turn(number) for number in range(3)])
    with pytest.warns(RuntimeWarning, match="called 3 times on another thread than the session's"):
        with opened(training, tmp_path):
            loop.start()
            loop.join()


def test_a_loop_whose_own_hooks_take_what_is_saved_is_told_that_nothing_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = plain(blocks(), lambda _: torch.autograd.graph.save_on_cpu())
    with opened(training, tmp_path, quiet=False):
        for number in range(8):
            training.turn(number)
    assert "no backward has used what the model saved" in capsys.readouterr().err


class Named(torch.Tensor):
    """A subclass that adds nothing, and stays one through a network."""


def test_a_loop_that_saves_only_what_no_plan_moves_is_told_so(tmp_path: Path) -> None:
    training = plain_of(network(), BATCH.as_subclass(Named))
    told = "all that they save is sparse, nested or of a subclass"
    with pytest.warns(RuntimeWarning, match=told), opened(training, tmp_path):
        for number in range(12):
            training.turn(number)


FORKS = """
import sys, torch, poochplan
from torch.utils.data import DataLoader, Dataset
from tests.online.test_unusual_loops import QUICK, network

class Sharpened(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, number):
        inputs = torch.full((512, 64), 0.1 * number).requires_grad_()
        (gradient,) = torch.autograd.grad((inputs.exp() * inputs).sum(), inputs)
        return (inputs + 0.1 * gradient).detach()

def losses(budget):
    model, found = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    def train():
        for _ in range(3):
            loader = DataLoader(Sharpened(), batch_size=4, num_workers=1, multiprocessing_context="fork", timeout=60)
            for batch in loader:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
    if budget is None:
        train()
        return found
    with poochplan.auto(model, optimizer, budget=budget, cache=sys.argv[1], before_plan=sys.argv[2], **QUICK):
        train()
    return found

torch.set_num_threads(1)
print(losses(None) == losses("80%"))
"""


@pytest.mark.parametrize("before_plan", ["in-core", "swap"])
def test_a_worker_that_is_forked_in_a_session_computes_gradients_of_its_own(before_plan: str, tmp_path: Path) -> None:
    """As under a given plan: ``tests/runtime/test_faults.py``."""
    assert python(FORKS, tmp_path, before_plan).splitlines()[-1] == "True"


def test_steps_whose_peaks_vary_are_settled_under_their_largest_one() -> None:
    plan = poochplan.plan(CASES["residual"].profile(), "200%")
    active, most = ActivePlan("", plan), plan.prediction.peak_bytes
    due = []
    for more in (0, 5, 1, 4, 2, 5, 3, 5):
        active.begins()
        active.ended(most + more, has_gradients=False)
        due.append(active.is_due)
    assert due[-5:] == [False] * 5
    active.ended(most + 6, has_gradients=False)
    assert active.is_due


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder: a script of the user's has the name of a module."""
    (tmp_path / "random.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_process_that_plans_runs_nothing_of_the_working_folder(elsewhere: Path) -> None:
    session = planning(plain(blocks()), elsewhere / "cache")
    assert session.wait_until_planned(60)
    session.close()
    assert len(session.plans) == 1


def test_a_second_planning_process_that_cannot_be_started_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, started = list[object](), subprocess.Popen

    def refused(*arguments: Any, **options: Any) -> Any:
        begun.append(arguments)
        if len(begun) > 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return started(*arguments, **options)

    monkeypatch.setattr("poochplan.online.background.subprocess.Popen", refused)
    model = network()
    training = stepping(
        model,
        lambda _: (model(BATCH).square().mean() for _ in range(2)),  # the second accumulates gradients: another kind
        torch.optim.SGD(model.parameters(), lr=0.01),
        zeroes_last=True,
    )
    with pytest.warns(RuntimeWarning, match=r"planning could not begin \(Resource temporarily unavailable\)"):
        session = run_auto(lambda: training, "60%", tmp_path, 30, is_metered=False, quiet=False).session
    assert len(session.plans) == 1


def test_a_cache_knows_the_classes_of_optimizers_and_what_they_keep() -> None:
    model, found = network(), list[list[str]]()
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda given: torch.optim.SGD(given, lr=0.1),
        lambda given: torch.optim.SGD(given, lr=0.0),
        lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
        lambda given: torch.optim.AdamW(given, lr=0.1),
        lambda given: torch.optim.AdamW(given, lr=0.1, amsgrad=True),
    ]
    for kind in kinds:
        optimizer = kind(model.parameters())
        found.append(optimizers_of(model))
        del optimizer
        gc.collect()
    assert found[0] == found[1]
    assert len({tuple(one) for one in found}) == 4


HEAVY = ("highspy", "matplotlib", "numba", "pandas", "pulp", "scipy", "sympy", "torch._dynamo", "torch._inductor")
LOOP = """
import json, sys
import torch
from torch import nn
import poochplan
from poochplan.formats.profile import preset_link

class Descent(torch.optim.Optimizer):
    # Without add_param_group and zero_grad of torch's own, which load the compiler to hide from it.
    def add_param_group(self, group):
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=1e-3)
            parameter.grad = None

def loads():
    return [name for name in json.loads(sys.argv[1]) if name in sys.modules]

layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.1, batch_first=True)
model, rows = nn.TransformerEncoder(layer, 2), torch.randn(16, 32, 64)
optimizer = Descent([{"params": list(model.parameters())}], {})

def turn():
    model(rows).square().mean().backward()
    optimizer.step()

turn()
before, found = loads(), {}
options = {"cache": sys.argv[2], "link": preset_link("pcie3"), "time_limit_s": 0.5, "quiet": True}
with poochplan.auto(model, optimizer, budget="70%", **options) as session:
    found["entered"] = loads()
    for _ in range(30):
        turn()
        if session.plan is None:
            session.wait_until_planned(120)
    found["followed"] = loads()
found["ended"] = loads()
print(json.dumps({"before": before, "found": found, "followed": session.report().steps_followed}))
"""


def test_a_loop_loads_nothing_heavy_from_its_first_step_through_its_plan(tmp_path: Path) -> None:
    told = json.loads(python(LOOP, json.dumps(HEAVY), tmp_path, is_fresh=True))
    assert not {"torch._dynamo", "torch._inductor"} & set(told["before"])  # else the rest says nothing of them
    assert told["followed"] > 0
    assert told["found"] == dict.fromkeys(("entered", "followed", "ended"), told["before"])
