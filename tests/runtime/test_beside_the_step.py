"""What lives beside a step counts without being told, and a message names its holder; told ahead, it is planned for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import poochplan
from poochplan.errors import BudgetExceededError, UsageError
from poochplan.planner.whatif import with_bytes_beside
from tests.live_bytes import LiveBytes
from tests.runtime.besides import BATCH, WIDTH, Loop, fresh, plain_step, profiled, tight, under

pytestmark = pytest.mark.cpu_device


class Volumes:
    """A loader that keeps its source, and cuts batches out of it."""

    def __init__(self) -> None:
        self.source = torch.randn(16, BATCH, WIDTH)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in (0, 3, 5):
            yield self.source[index].clone()


@dataclass
class Beside:
    """What lives beside the step, what a message calls it, and how the loop uses it."""

    name: str
    also: Any
    batches: Iterable[torch.Tensor] = field(default_factory=lambda: [torch.ones(BATCH, WIDTH)] * 3)
    after_step: Callable[[], object] = int


def data_set(model: nn.Module) -> Beside:
    data = TensorDataset(torch.randn(BATCH * 16, WIDTH))
    ((batch,), *_) = DataLoader(data, batch_size=BATCH, shuffle=True)
    return Beside(r"TensorDataset\.tensors", data, [batch] * 3)


def average(model: nn.Module, steps: int = 3) -> Beside:
    held = AveragedModel(model)
    batches = [torch.ones(BATCH, WIDTH)] * steps
    return Beside("the weights of AveragedModel", held, batches, lambda: held.update_parameters(model))


def source(model: nn.Module) -> Beside:
    volumes = Volumes()
    return Beside(r"Volumes\.source", volumes, volumes)


KINDS = (data_set, average, source)


def loop(optimizer: torch.optim.Optimizer, beside: Beside) -> Loop:
    def train(model: nn.Module) -> None:
        for batch in beside.batches:
            plain_step(model, optimizer, batch)
            beside.after_step()

    return train


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_what_lives_beside_the_step_is_told_once_with_its_holder_and_its_bytes(
    kind: Callable[[nn.Module], Beside],
) -> None:
    model = fresh()
    plan = tight(profiled(model, adam(model)))
    beside = kind(model)
    report, told = under(plan, model, loop(adam(model), beside))
    assert len(told) == 1, told
    assert plan.budget_bytes < report.total.peak_bytes
    assert f"more than its budget of {plan.budget_bytes}" in told[0]
    assert re.search(beside.name + r" \([\d.]+ [KM]iB\)", told[0]), told[0]
    assert " in forward of layers." in told[0] or " in backward" in told[0] or " in optimizer" in told[0], told[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_profile_was_told_of_is_within_the_budget_by_any_meter(kind: Callable[[nn.Module], Beside]) -> None:
    model = fresh()
    beside, optimizer = kind(model), adam(model)
    plan = tight(profiled(model, optimizer, [beside.also]))
    with LiveBytes() as outside:
        report, told = under(plan, model, loop(optimizer, beside))
    assert told == []
    assert report.total.peak_bytes <= plan.prediction.peak_bytes <= plan.budget_bytes
    assert outside.peak <= plan.budget_bytes


def test_the_state_of_an_optimizer_that_the_profile_knew_nothing_of_is_named() -> None:
    model = fresh()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
    batch = torch.ones(BATCH, WIDTH)

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    def train(_: nn.Module) -> None:
        for _ in range(3):
            optimizer.step(closure)

    with pytest.raises(
        UsageError, match=r"whose step\(\) needs no closure, found LBFGS, .* profile without optimizer="
    ):
        profiled(model, optimizer)
    _, told = under(tight(profiled(model, None)), model, train)
    assert [line for line in told if "the state of LBFGS" in line], told
    again = tight(profiled(model, None, also=[optimizer]))
    assert again.budget_bytes > tight(profiled(fresh(), None)).budget_bytes


def test_buckets_of_data_parallel_training_are_named_and_planned_for(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inner = fresh()
        optimizer = adam(inner)
        plan = tight(profiled(inner, optimizer))
        wrapped = nn.parallel.DistributedDataParallel(inner)
        train = loop(optimizer, Beside("", None))
        _, told = under(plan, wrapped, train)
        assert len(told) == 1, told
        assert "buckets of DistributedDataParallel" in told[0]
        knowing = tight(profiled(inner, optimizer, also=[wrapped]))
        report, told = under(knowing, wrapped, train)
        assert told == []
        assert report.total.peak_bytes <= knowing.budget_bytes
    finally:
        torch.distributed.destroy_process_group()


def test_on_request_a_step_above_its_budget_raises_at_its_end() -> None:
    model = fresh()
    plan, optimizer = tight(profiled(model, adam(model))), adam(model)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(BudgetExceededError, match="more than its budget of") as raised:
        under(plan, model, loop(optimizer, average(model)), on_over_budget="error")
    assert raised.value.exit_code == 5
    assert raised.value.peak_bytes > plan.budget_bytes
    assert not any(map(torch.equal, before, model.parameters())), "the optimizer has stepped"
    assert not model._forward_pre_hooks


def test_where_the_profile_is_given_a_new_plan_is_made_with_what_was_measured_and_followed_from_the_next_step() -> None:
    model = fresh()
    profile = profiled(model, adam(model))
    train = loop(adam(model), average(model, steps=6))
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    # A new plan needs the weights once more than the tight one. At twice, an arena's first plan leaves room for them.
    plan = poochplan.plan(profile, tight(profile).budget_bytes + 3 * own_bytes // 2, evaluations=100)
    report, told = under(plan, model, train, profile=profile, meter="always")
    assert report.last_step.peak_bytes <= plan.budget_bytes < report.total.peak_bytes, told
    assert report.total.fallbacks == 0
    assert report.status == "followed"
    (line,) = told
    assert "from the next step on, steps follow a plan that has room for" in line


def test_where_no_plan_has_room_for_it_the_smallest_budget_is_said() -> None:
    model = fresh()
    profile, train = profiled(model, adam(model)), loop(adam(model), average(model))
    _, told = under(tight(profile), model, train, on_over_budget="replan", profile=profile)
    assert len(told) == 1
    assert "no plan fits a budget of" in told[0]


def test_a_new_plan_needs_the_profile_of_the_old_one() -> None:
    model = fresh()
    plan = tight(profiled(model, None))
    with pytest.raises(UsageError, match="expected the profile that the plan was made from, found none; pass it"):
        poochplan.apply(plan, model, on_over_budget="replan")
    with pytest.raises(UsageError, match='on_over_budget: expected "warn", "error" or "replan", found \'never\''):
        poochplan.apply(plan, model, on_over_budget="never")  # type: ignore[arg-type]


def test_bytes_beside_a_profile_raise_every_plan_by_as_much() -> None:
    model = fresh()
    profile = profiled(model, None)
    more = with_bytes_beside(profile, 1000)
    assert more.in_core_peak_bytes == profile.in_core_peak_bytes + 1024
    assert tight(more).prediction.peak_bytes == tight(profile).prediction.peak_bytes + 1024


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_what_runs_behind_the_step_is_not_metered(has_optimizer: bool) -> None:
    """A validation, and behind the optimizer also a copy of the weights that is saved."""
    model = fresh()
    optimizer = adam(model) if has_optimizer else None
    plan = tight(profiled(model, optimizer))
    batch = torch.ones(BATCH, WIDTH)

    def train(model: nn.Module) -> None:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(batch).square().mean().backward()
            if optimizer is not None:
                optimizer.step()
            with torch.no_grad():
                outputs = [model(batch) for _ in range(16)]
            if optimizer is not None:
                outputs += [parameter.repeat(32, *[1] * (parameter.ndim - 1)) for parameter in model.parameters()]
            del outputs

    report, told = under(plan, model, train, meter="always")
    assert told == []
    assert report.total.peak_bytes <= plan.budget_bytes
    assert report.last_step.peak_bytes is not None


def test_also_takes_what_holds_tensors_and_refuses_what_holds_none() -> None:
    model = fresh()
    with pytest.raises(UsageError, match="also: expected modules, tensors or objects that hold tensors, found dict"):
        profiled(model, None, also=[{"nothing": 1}])
    with pytest.raises(UsageError, match="also: expected a list of modules, tensors or containers, found Tensor"):
        profiled(model, None, also=torch.ones(3))  # type: ignore[arg-type]
    beside = torch.zeros(5000)
    plain, more = profiled(model, None), profiled(model, None, also=[{"a": [beside, beside[:10]]}, model])
    assert more.in_core_peak_bytes == plain.in_core_peak_bytes + 20480
