"""A plan holds the bits of a mask in place of the mask: gradients stay bitwise those of in-core training, at the bytes
simulated.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats import narrow as formats
from poochplan.formats.forms import BITS, form_of
from poochplan.formats.narrow import masks_of, narrowed, with_bits
from poochplan.formats.plan import Decision
from poochplan.formats.profile import LinkDirection, Profile
from poochplan.runtime.replays import bits
from poochplan.runtime.replays.replay import Birth, RecordedOp, StorageRecord, run_ops
from poochplan.tensors.operators import Flat
from tests.depth import seeds
from tests.live_bytes import LiveBytes
from tests.planner.checker import check
from tests.planner.plans import random_decisions
from tests.runtime.by_hand import held, planned, problem_of
from tests.runtime.mask_nets import COUNTS, MASKS, Drawn
from tests.runtime.nets import equal, followed, in_core, metered_peaks
from tests.runtime.served import SETTLED, Loop, needs_compiler

KEEP, SWAP, RECOMPUTE = Decision
EVALUATIONS = 300
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("decision", Decision)
def test_bits_are_held_or_swapped_in_place_of_a_mask_or_it_is_drawn_again(name: str, decision: Decision) -> None:
    case = MASKS[name]
    profile = case.profile()
    assert sum(form_of(profile, value) == BITS for value in masks_of(profile).values()) == COUNTS[name]
    plan, found = planned(case, held(problem_of(case), decision))
    assert sum(value.name.endswith(" as bits") for value in plan.values) == COUNTS[name]
    report = followed(case, plan, 3)
    assert report.last_step.replayed_values >= COUNTS[name]
    assert metered_peaks(case, plan)[1] == found.simulation.peak_bytes
    assert check(case.profile(), plan).peak_bytes == found.simulation.peak_bytes


@pytest.mark.parametrize("name", MASKS)
def test_any_decisions_about_bits_give_the_gradients_of_in_core_training(name: str) -> None:
    for seed in seeds(6, 40):
        problem = problem_of(MASKS[name])
        plan, found = planned(MASKS[name], random_decisions(problem, seed), (0.0, 0.7, 0.9)[seed % 3], seed % 3)
        followed(MASKS[name], plan, 2)
        assert metered_peaks(MASKS[name], plan) == [
            found.simulation.first_step_peak_bytes,
            found.simulation.peak_bytes,
        ]


def with_slow_copies(profile: Profile) -> Profile:
    slow = LinkDirection(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    line = msgspec.structs.replace(profile.link, outward=slow, inward=slow)
    return msgspec.structs.replace(profile, link=line, runtime=None)


@pytest.mark.parametrize("name", MASKS)
def test_plans_of_the_planner_hold_bits_within_a_budget_that_an_outside_meter_sees_kept(name: str) -> None:
    case = MASKS[name]
    profile = with_slow_copies(case.profile())
    smallest = poochplan.smallest_budget(profile, arena="off")
    budget_bytes = smallest + (profile.in_core_peak_bytes - smallest) // 4
    plan = poochplan.plan(profile, budget_bytes, evaluations=EVALUATIONS, arena="off", gap=0.0)
    assert any(value.bits and value.until >= 0 and value.decision is not RECOMPUTE for value in plan.values)
    assert check(profile, plan).peak_bytes == plan.prediction.peak_bytes <= budget_bytes
    without = poochplan.plan(
        profile, budget_bytes, evaluations=EVALUATIONS, arena="off", gap=0.0, without=("sources", "narrow")
    )
    assert not any(value.source for value in without.values)
    assert plan.prediction.step_s <= without.prediction.step_s
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


@pytest.mark.cpu_device
@needs_compiler
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_steps_that_hold_bits_are_served_from_an_arena(name: str, decision: Decision) -> None:
    plan, _ = planned(MASKS[name], held(problem_of(MASKS[name]), decision), is_laid_out=True)
    loop = Loop(MASKS[name])
    with poochplan.apply(plan, loop.model, arena="on") as session:
        loop.session = session
        loop.steps(SETTLED + 2)
        assert loop.is_served_whole
        assert session.report().total.fallbacks == 0
    assert equal(loop.seen, in_core(MASKS[name], SETTLED + 2))


class Masked(nn.Module):
    """A mask of the planned kind, or one of another making that autograd cannot tell from it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(64, 64), "drawn"

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(batch)
        if self.how.endswith("bools"):
            return hidden * self._bools(hidden.detach())
        mask = torch.empty_like(hidden)
        if self.how == "uniform":
            mask.uniform_()
        elif self.how == "filled":
            mask.fill_(1.0)
        else:
            mask.bernoulli_(0.7)
        torch.ops.aten.div_.Scalar(mask, 0.7)
        if self.how == "one more write":
            mask.view(-1)[:10].mul_(3)
        if self.how == "unseen write":
            mask.data[0] = 5.0
        out = hidden * mask
        if self.how == "written after the save":
            mask.mul_(2)
        return out

    def _bools(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.how == "compared bools":
            return hidden > 0
        mask = torch.native_dropout(hidden, 0.3, True)[1]
        if self.how == "written bools":
            mask.logical_not_()
        if self.how == "unseen bools":
            mask.data[0] = False
        return mask


def masked(how: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    batch, model = torch.randn(256, 64), Masked()
    model.how = how
    return model, lambda model: model(batch).square().mean()


OTHERWISE = ("filled", "uniform", "one more write", "unseen write", "compared bools", "written bools", "unseen bools")


@pytest.mark.parametrize("how", OTHERWISE)
@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_what_other_ops_have_made_is_swapped_and_not_narrowed(how: str, decision: Decision) -> None:
    case = Drawn(lambda: masked("drawn bools" if how.endswith("bools") else "drawn"))
    plan, _ = planned(case, held(problem_of(case), decision))
    assert sum(value.bits and value.until >= 0 for value in plan.values) == 1
    assert followed(case, plan).total.fallbacks == 0
    model, loss_of = masked(how)
    found = []
    for given in (None, plan):
        torch.manual_seed(5)
        model.zero_grad(set_to_none=True)
        if given is None:
            loss_of(model).backward()
        else:
            with poochplan.apply(plan, model) as session:
                loss_of(model).backward()
            assert session.report().total.fallbacks == 1
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append([gradient.view(INTEGERS[gradient.element_size()]) for gradient in gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_mask_that_is_written_after_its_save_raises_what_autograd_raises() -> None:
    assert masks_of(Drawn(lambda: masked("drawn")).profile())
    case = Drawn(lambda: masked("drawn"))
    plan, _ = planned(case, held(problem_of(case), KEEP))
    model, loss_of = masked("written after the save")
    with poochplan.apply(plan, model), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(model).backward()


@pytest.mark.parametrize("dtype", bits._INTEGERS)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, bits.PART, bits.PART + 1, 2 * bits.PART + 4093])
def test_narrowing_gives_numpys_bits_and_widening_the_very_patterns(dtype: torch.dtype, count: int) -> None:
    drawn = torch.rand(count) < 0.6
    patterns = bits.Patterns(0x8000, 0x7FC1)  # minus zero, and a number that is none, in 16 bits
    if dtype is torch.bool:
        patterns = bits.Patterns(0, 1)
    integers = torch.where(drawn, patterns.one, patterns.zero).to(bits._INTEGERS[dtype][0])
    storage = integers.view(dtype).untyped_storage()
    made = bits.narrow(storage, dtype, patterns)
    assert made is not None
    packed = torch.empty(0, dtype=torch.uint8).set_(made, 0, (made.nbytes(),), (1,))
    assert packed.numpy().tolist() == np.packbits(drawn.numpy(), bitorder="little").tolist()
    back = bits.widen(packed, count, dtype, patterns)
    assert torch.equal(back.view(integers.dtype), integers)
    integers[count // 2] = 2
    assert bits.narrow(storage, dtype, patterns) is None


def test_a_mask_that_dropout_makes_again_is_gone_before_it_is_widened() -> None:
    tensor = torch.zeros(64, dtype=torch.bool)
    record, made = StorageRecord(weakref.ref(tensor.untyped_storage()), 0), list[weakref.ref[torch.UntypedStorage]]()

    def drawn() -> torch.Tensor:
        mask = torch.zeros(64, dtype=torch.bool)
        made.append(weakref.ref(mask.untyped_storage()))
        return mask

    def widened() -> torch.Tensor:
        assert [one() for one in made] == [None]
        return torch.ones(64, dtype=torch.bool)

    ops = [RecordedOp(order, func, (), (), Flat(0, ()), False) for order, func in enumerate((drawn, widened))]
    for op in ops:
        op.births = (Birth(0, record),)
    built = run_ops(ops, {}, {record}, "cpu")
    assert torch.equal(torch.empty(0, dtype=torch.bool).set_(built[record]), torch.ones(64, dtype=torch.bool))


def test_profile_and_runtime_know_the_same_ops_that_make_masks() -> None:
    assert str(bits.DRAWING) == formats.DRAWING
    assert {str(op) for op in bits.MAKING} == formats.MAKING
    assert {str(op) for op in bits.SCALING} == formats.SCALING
    assert {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in bits._INTEGERS} == formats.ELEMENT_BYTES


def test_bits_are_added_once() -> None:
    profile = MASKS["float32"].profile()
    once = with_bits(profile)
    assert with_bits(once) is once
    assert len(narrowed(once)) == 12
    assert len(once.points) == len(profile.points) + 12
    assert len(once.ops) == len(profile.ops) + 12
    assert len(once.values) == len(profile.values) + 12
    assert json.loads(msgspec.json.encode(profile)) == json.loads(msgspec.json.encode(MASKS["float32"].profile()))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_gradients_are_those_of_in_core_training_as_integers(name: str, decision: Decision) -> None:
    plan, _ = planned(MASKS[name], held(problem_of(MASKS[name]), decision))
    found = []
    for given in (None, plan):
        model, step, _ = MASKS[name].fresh()
        if given is None:
            step().backward()
        else:
            with poochplan.apply(plan, model) as session:
                step().backward()
            assert session.report().total.fallbacks == 0
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append([gradient.view(INTEGERS[gradient.element_size()]) for gradient in gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
