"""A plan holds a smaller tensor in place of the larger copy that autograd saves of it: gradients stay bitwise those of
in-core training, at the bytes simulated.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision
from poochplan.formats.profile import LinkDirection
from poochplan.formats.sources import WIDENING, sources_of
from poochplan.torch_private import tensor_internals
from tests.depth import seeds
from tests.live_bytes import LiveBytes
from tests.planner.plans import random_decisions
from tests.runtime.by_hand import held, planned, problem_of
from tests.runtime.cast_nets import CASTS
from tests.runtime.nets import Case, equal, followed, in_core, metered_peaks
from tests.runtime.served import SETTLED, Loop, needs_compiler

KEEP, SWAP, RECOMPUTE = Decision
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
EVALUATIONS = 300


@pytest.mark.parametrize("name", CASTS)
def test_the_networks_have_sources(name: str) -> None:
    assert len(sources_of(CASTS[name].profile())) >= 4


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("decision", Decision)
def test_a_source_is_held_swapped_or_replayed_in_place_of_its_copy(name: str, decision: Decision) -> None:
    plan, found = planned(CASTS[name], held(problem_of(CASTS[name]), decision))
    report = followed(CASTS[name], plan, 3)
    assert report.last_step.replayed_values >= len(problem_of(CASTS[name]).copies)
    assert metered_peaks(CASTS[name], plan)[1] == found.simulation.peak_bytes


@pytest.mark.parametrize("name", CASTS)
def test_any_decisions_about_sources_give_the_gradients_of_in_core_training(name: str) -> None:
    for seed in seeds(6, 40):
        problem = problem_of(CASTS[name])
        plan, found = planned(CASTS[name], random_decisions(problem, seed), (0.0, 0.7, 0.9)[seed % 3], seed % 3)
        followed(CASTS[name], plan, 2)
        assert metered_peaks(CASTS[name], plan) == [
            found.simulation.first_step_peak_bytes,
            found.simulation.peak_bytes,
        ]


@pytest.mark.parametrize("name", CASTS)
def test_plans_of_the_planner_hold_sources_within_a_budget_that_an_outside_meter_sees_kept(name: str) -> None:
    case = CASTS[name]
    slow = LinkDirection(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    line = msgspec.structs.replace(case.profile().link, outward=slow, inward=slow)
    ops = tuple(msgspec.structs.replace(op, duration_s=1e-4) for op in case.profile().ops)
    profile = msgspec.structs.replace(case.profile(), link=line, ops=ops, runtime=None)  # copies take longer
    smallest = poochplan.smallest_budget(profile, arena="off")
    budget_bytes = smallest + (profile.in_core_peak_bytes - smallest) // 4
    plan = poochplan.plan(profile, budget_bytes, evaluations=EVALUATIONS, arena="off", gap=0.0)
    assert any(value.source and value.until >= 0 for value in plan.values)
    model, step, optimizer = case.fresh()
    peaks, loss = list[int](), torch.zeros(())
    with poochplan.apply(plan, model, meter="never") as session:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            state = [tensor for entries in optimizer.state.values() for tensor in entries.values()]
            with LiveBytes(*model.parameters(), *state, loss) as meter:
                loss = step()
                loss.backward()
                optimizer.step()
            peaks.append(meter.peak)
    assert session.report().total.fallbacks == 0
    outside = profile.static_bytes.get("input", 0)  # the batch, which the meter sees as it is read
    assert max(peaks) <= budget_bytes + outside


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("decision", Decision)
def test_bits_are_those_of_in_core_training_as_integers_whatever_is_not_a_number(name: str, decision: Decision) -> None:
    plan, _ = planned(CASTS[name], held(problem_of(CASTS[name]), decision))
    found = []
    for given in (None, plan):
        model, _, _ = CASTS[name].fresh()
        weight = next(model.parameters())
        with torch.no_grad():
            patterns = torch.arange(weight.numel()) * (65536 // weight.numel()) + 3
            weight.copy_(patterns.to(torch.uint16).view(torch.bfloat16).view(weight.shape))
            weight[: len(weight) // 2] = 0.25
        loss_of = CASTS[name].make()[1]
        if given is None:
            loss_of(model).backward()
        else:
            with poochplan.apply(given, model):
                loss_of(model).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append([gradient.view(INTEGERS[gradient.element_size()]) for gradient in gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.cpu_device
@needs_compiler
@pytest.mark.parametrize("name", CASTS)
def test_steps_that_hold_sources_are_served_from_an_arena(name: str) -> None:
    wish = held(problem_of(CASTS[name]), SWAP, RECOMPUTE)
    plan, _ = planned(CASTS[name], wish, is_laid_out=True)
    loop = Loop(CASTS[name])
    with poochplan.apply(plan, loop.model, arena="on") as session:
        loop.session = session
        loop.steps(SETTLED + 2)
        assert loop.is_served_whole
        assert session.report().total.fallbacks == 0
    assert equal(loop.seen, in_core(CASTS[name], SETTLED + 2))


class WrittenLater(nn.Module):
    """Writes what a copy is made of: never, right behind the copy, or once the copy is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.when = nn.Linear(32, 32), "never"

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        narrow = self.linear(batch).to(torch.bfloat16) * 0.5
        wide = narrow.float()
        if self.when == "before the save":
            narrow.mul_(2)
        squared = wide * wide
        if self.when == "after the save":
            narrow.mul_(2)
        return squared + narrow.sum(-1, keepdim=True)


def _written(when: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    batch, model = torch.randn(16, 32), WrittenLater()
    model.when = when
    return model, lambda model: model(batch).square().mean()


@pytest.mark.parametrize("when", ["before the save", "after the save"])
def test_a_source_that_its_step_writes_later_is_held_by_no_plan(when: str) -> None:
    assert sources_of(Case(lambda: _written(when)).profile()) == {}
    assert len(sources_of(Case(lambda: _written("never")).profile())) == 1


@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_a_source_that_is_written_against_the_plan_gives_no_wrong_gradients(decision: Decision) -> None:
    case = Case(lambda: _written("never"))
    plan, _ = planned(case, held(problem_of(case), decision))
    assert sum(value.until >= 0 for value in plan.values) == 1
    followed(case, plan)
    for when in ("before the save", "after the save"):
        model, loss_of = _written(when)
        loss_of(model).backward()
        wanted = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        with poochplan.apply(plan, model):
            refused = _refused(loss_of(model))
        assert not refused or ("modified by an inplace operation" in refused and when == "after the save")
        found = [parameter.grad for parameter in model.parameters()]
        assert refused or all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def _refused(loss: torch.Tensor) -> str:
    """The error of its backward; empty without one."""
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_profile_and_runtime_know_the_same_ops_that_widen() -> None:
    assert {str(op) for op in tensor_internals.WIDENING} == WIDENING
