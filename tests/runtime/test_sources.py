"""A plan holds the source of a larger copy in place of it. Gradients stay bitwise those of in-core training, at the
bytes simulated; a source that its step writes is held by no plan, and gives no wrong gradients against one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Decision
from poochplan.planner.simulator import sources
from poochplan.planner.simulator.sources import sources_of
from poochplan.torch_private import tensor_internals
from tests.depth import seeds
from tests.live_bytes import LiveBytes
from tests.planner.checker import check
from tests.planner.plans import random_decisions
from tests.runtime.nets import Case, Net, equal, followed, in_core, metered_peaks, of
from tests.runtime.random_plans import gradient_bits, held, planned, problem_of, with_slow_copies
from tests.runtime.served import SETTLED, Loop, needs_compiler
from tests.runtime.source_nets import CASTS

KEEP, SWAP, RECOMPUTE = Decision
of_each = pytest.mark.parametrize("name", CASTS)


@of_each
@pytest.mark.parametrize("decision", Decision)
def test_it_is_held_swapped_or_made_again_in_place_of_its_copy(name: str, decision: Decision) -> None:
    case, problem = CASTS[name], problem_of(CASTS[name])
    wish = held(problem, decision)
    plan, found = planned(case, wish)
    replayed = {copy for copy in problem.copies.values() if wish[copy] is RECOMPUTE}
    assert len(replayed) >= 4
    assert followed(case, plan, 3).last_step.replayed_values >= len(replayed)
    assert metered_peaks(case, plan)[1] == found.simulation.peak_bytes
    assert check(case.profile(), plan).peak_bytes == found.simulation.peak_bytes
    if decision is not RECOMPUTE:
        model, loss_of = case.make()
        assert gradient_bits(model, loss_of, plan) == gradient_bits(model, loss_of)


@needs_compiler
@of_each
def test_any_decisions_give_the_gradients_of_in_core_training(name: str) -> None:
    for seed in seeds(3, 40):
        decisions = random_decisions(problem_of(CASTS[name]), seed)
        plan, found = planned(CASTS[name], decisions, (0.0, 0.7, 0.9)[seed % 3], seed % 3)
        followed(CASTS[name], plan, 2)
        simulated = found.simulation
        assert metered_peaks(CASTS[name], plan) == [simulated.first_step_peak_bytes, simulated.peak_bytes]


@of_each
def test_plans_of_the_planner_hold_them_within_a_budget_that_an_outside_meter_sees_kept(name: str) -> None:
    case = CASTS[name]
    profile = with_slow_copies(case.profile())
    ops = tuple(msgspec.structs.replace(op, duration_s=1e-4) for op in profile.ops)  # copies take longer
    profile = msgspec.structs.replace(profile, ops=ops)
    smallest = poochplan.smallest_budget(profile, arena="off")
    budget_bytes = smallest + (profile.in_core_peak_bytes - smallest) // 4
    plan, without = (
        poochplan.plan(profile, budget_bytes, evaluations=1500, arena="off", gap=0.0, without=without)
        for without in ((), ("sources",))
    )
    assert any(one.source and one.until >= 0 and one.decision is not RECOMPUTE for one in plan.values)
    assert not any(value.source for value in without.values)
    assert check(profile, plan).peak_bytes == plan.prediction.peak_bytes <= budget_bytes
    assert plan.prediction.step_s <= without.prediction.step_s
    assert _live_peak(case.fresh(), plan) <= budget_bytes + profile.static_bytes.get("input", 0)


def _live_peak(fresh: tuple[nn.Module, Callable[[], torch.Tensor], torch.optim.Optimizer], plan: poochplan.Plan) -> int:
    """Of two steps, with the batch, which the meter sees as it is read."""
    model, step, optimizer = fresh
    peaks, loss = list[int](), torch.zeros(())
    with poochplan.apply(plan, model, meter="never") as session:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            state = [tensor for entries in optimizer.state.values() for tensor in entries.values()]
            with LiveBytes(*model.parameters(), *state, loss) as meter:
                loss = step()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            peaks.append(meter.peak)
    assert session.report().total.fallbacks == 0
    return max(peaks)


@pytest.mark.cpu_device
@needs_compiler
@of_each
def test_steps_that_hold_them_are_served_from_an_arena(name: str) -> None:
    case = CASTS[name]
    plan, _ = planned(case, held(problem_of(case), SWAP, RECOMPUTE), is_laid_out=True)
    loop = Loop(case)
    with poochplan.apply(plan, loop.model, arena="on") as session:
        loop.session = session
        loop.steps(SETTLED + 2)
        assert loop.is_served_whole
        assert session.report().total.fallbacks == 0
    assert equal(loop.seen, in_core(case, SETTLED + 2))


@of_each
@pytest.mark.parametrize("decision", Decision)
def test_they_give_the_bits_of_in_core_training_whatever_is_not_a_number(name: str, decision: Decision) -> None:
    case = CASTS[name]
    assert len(sources_of(case.profile())) >= 4
    plan, _ = planned(case, held(problem_of(case), decision))
    model, loss_of = case.make()
    weight = next(model.parameters())
    with torch.no_grad():
        patterns = torch.arange(weight.numel()) * (65536 // weight.numel()) + 3
        weight.copy_(patterns.to(torch.uint16).view(torch.bfloat16).view(weight.shape))
        weight[: len(weight) // 2] = 0.25
    assert gradient_bits(model, loss_of, plan) == gradient_bits(model, loss_of)


def test_profile_and_runtime_know_the_same_ops() -> None:
    assert {str(op) for op in tensor_internals.WIDENING} == sources.WIDENING


def _written(when: str) -> Case:
    """Writes what a copy is made of: never, right behind the copy, or once the copy is saved."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        narrow = net.linear(batch).to(torch.bfloat16) * 0.5
        wide = narrow.float()
        if when == "before the save":
            narrow.mul_(2)
        squared = wide * wide
        if when == "after the save":
            narrow.mul_(2)
        return squared + narrow.sum(-1, keepdim=True)

    return of(lambda: Net(body, linear=nn.Linear(32, 32)), 16, 32)


@pytest.mark.parametrize("when", ["before the save", "after the save"])
def test_a_source_that_its_step_writes_later_is_held_by_no_plan(when: str) -> None:
    assert sources_of(_written(when).profile()) == {}
    assert len(sources_of(_written("never").profile())) == 1


@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_a_source_that_is_written_against_the_plan_gives_no_wrong_gradients(decision: Decision) -> None:
    case = _written("never")
    plan, _ = planned(case, held(problem_of(case), decision))
    assert sum(value.until >= 0 for value in plan.values) == 1
    followed(case, plan)
    for when in ("before the save", "after the save"):
        model, loss_of = _written(when).make()
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
