"""A plan holds indices and casts in fewer bytes: gradients stay bitwise those of in-core training, at the bytes
simulated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats import forms
from poochplan.formats.narrow import masks_of
from poochplan.formats.plan import Decision, Plan
from poochplan.runtime.replays import fewer_bytes
from poochplan.runtime.replays.fewer_bytes import narrow, widen
from poochplan.tensors.storages import on_whole
from tests.depth import seeds
from tests.planner.checker import check
from tests.planner.plans import random_decisions
from tests.processes import python
from tests.runtime.by_hand import held, planned, problem_of
from tests.runtime.form_nets import FORMS, NAMES, Formed
from tests.runtime.nets import equal, followed, in_core, metered_peaks
from tests.runtime.served import SETTLED, Loop, needs_compiler
from tests.runtime.test_bits import with_slow_copies

KEEP, SWAP, RECOMPUTE = Decision


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_what_is_held_in_fewer_bytes_comes_back_as_it_was(name: str, decision: Decision) -> None:
    case = FORMS[name]
    profile = case.profile()
    plan, found = planned(case, held(problem_of(case), decision))
    narrowed = [value for value in plan.values if value.bits]
    assert [value.dtype for value in narrowed] == NAMES[name]
    assert all(value.decision is decision and value.until >= 0 for value in narrowed)
    assert followed(case, plan, 3).last_step.replayed_values >= len(narrowed)
    assert metered_peaks(case, plan)[1] == found.simulation.peak_bytes
    assert check(profile, plan).peak_bytes == found.simulation.peak_bytes
    wholes = {value.name: value.size_bytes for value in profile.values}
    for value in narrowed:
        whole, _, form = value.name.rpartition(" as ")
        shares = {"uint8": 8, "uint16": 4, "int32": 2, "bfloat16": 2}
        assert (form, shares[form] * value.size_bytes) == (value.dtype, wholes[whole])


@pytest.mark.parametrize("name", FORMS)
def test_any_decisions_about_them_give_the_gradients_of_in_core_training(name: str) -> None:
    for seed in seeds(4, 40):
        problem = problem_of(FORMS[name])
        plan, found = planned(FORMS[name], random_decisions(problem, seed), (0.0, 0.7, 0.9)[seed % 3], seed % 3)
        followed(FORMS[name], plan, 2)
        assert metered_peaks(FORMS[name], plan) == [
            found.simulation.first_step_peak_bytes,
            found.simulation.peak_bytes,
        ]


@pytest.mark.parametrize("name", ["Branches", "Choices", "Casts"])
def test_plans_of_the_planner_hold_them_within_the_budget(name: str) -> None:
    case = FORMS[name]
    profile = with_slow_copies(case.profile())
    smallest = poochplan.smallest_budget(profile, arena="off")
    budget_bytes = smallest + (profile.in_core_peak_bytes - smallest) // 8
    options = {"evaluations": 300, "arena": "off", "gap": 0.0}
    plan = poochplan.plan(profile, budget_bytes, **options)  # type: ignore[arg-type]
    assert any(value.bits and value.until >= 0 for value in plan.values)
    assert check(profile, plan).peak_bytes == plan.prediction.peak_bytes <= budget_bytes
    without = poochplan.plan(profile, budget_bytes, **options, without=["narrow"])  # type: ignore[arg-type]
    assert not any(value.bits for value in without.values)
    assert plan.prediction.step_s <= without.prediction.step_s
    row = "upper halves of casts" if name == "Casts" else "integers of indices"
    assert row in plan.rows()
    assert "bits of masks" not in plan.rows()
    assert max(metered_peaks(case, plan)) <= budget_bytes


@pytest.mark.cpu_device
@needs_compiler
@pytest.mark.parametrize("name", ["Pools", "Casts"])
@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_steps_that_hold_them_are_served_from_an_arena(name: str, decision: Decision) -> None:
    plan, _ = planned(FORMS[name], held(problem_of(FORMS[name]), decision), is_laid_out=True)
    loop = Loop(FORMS[name])
    with poochplan.apply(plan, loop.model, arena="on") as session:
        loop.session = session
        loop.steps(SETTLED + 2)
        assert loop.is_served_whole
        assert session.report().total.fallbacks == 0
    assert equal(loop.seen, in_core(FORMS[name], SETTLED + 2))


_METERED = """
import json
import torch
from tests.allocated_bytes import allocated_bytes
meter = allocated_bytes()  # before the package's allocator
import poochplan
from poochplan.formats.plan import Decision, Plan
from tests.runtime.by_hand import held, planned, problem_of
from tests.runtime.form_nets import FORMS
torch.set_num_threads(1)
found = []
for name, case in FORMS.items():
    for decision in (Decision.KEEP, Decision.SWAP):
        plan, _ = planned(case, held(problem_of(case), decision))
        before = meter.live
        model, step, optimizer = case.fresh()
        with poochplan.apply(plan, model, meter="never") as session:
            for number in range(3):
                optimizer.zero_grad(set_to_none=True)
                meter.restart()
                loss = step()
                loss.backward()
                optimizer.step()
        peaks = meter.peak - before, plan.prediction.peak_bytes
        found.append((name, decision, *peaks, session.report().total.fallbacks))
        del model, step, optimizer, loss, session
print(json.dumps(found))
"""
OUTSIDE_BYTES = 16384
"""Blocks that no plan counts: of less than 64 bytes each, and numbers of the step."""


@pytest.mark.cpu_device
@needs_compiler
def test_a_meter_from_outside_sees_no_more_bytes_than_predicted() -> None:
    for name, decision, peak_bytes, predicted_bytes, fallbacks in json.loads(python(_METERED).splitlines()[-1]):
        assert fallbacks == 0, name
        assert peak_bytes <= predicted_bytes + OUTSIDE_BYTES, (name, decision)


class Chosen(nn.Module):
    """Indices, or a cast, of the planned kind, or what is made otherwise and autograd cannot tell from it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(64, 64), how

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(batch)
        return self._cast(hidden) if self.how.endswith("cast") else hidden.gather(1, self._indices(hidden))

    def _indices(self, hidden: torch.Tensor) -> torch.Tensor:
        indices = hidden.detach().view(-1, 4, 16).argmax(2)
        if self.how == "drawn indices":
            indices = torch.randint(64, indices.shape)
        elif self.how == "converted indices":
            indices = (hidden.detach()[:, :4] > 0).long()
        elif self.how == "indices of another bound":
            beyond = (0, 256)  # planned were bytes
            indices = nn.functional.pad(hidden.detach().view(-1, 4, 16), beyond, value=-math.inf).argmax(2)
        elif self.how == "written indices":
            indices.bitwise_xor_(1)
        elif self.how == "indices written unseen":
            indices.data[0, 1] = 63
        return indices

    def _cast(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.how == "written cast":
            return (hidden.to(torch.bfloat16) * 0.5).float().mul_(1.001).square()
        if self.how == "float16 cast":
            return (hidden.to(torch.float16) * 0.5).float().square()
        if self.how == "computed cast":
            return (hidden * 0.37).square()
        return (hidden.to(torch.bfloat16) * 0.5).float().square()


def chosen(how: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    batch, model = torch.randn(4096, 64), Chosen(how)
    return model, lambda model: model(batch).square().mean()


OTHERWISE = ("drawn indices", "converted indices", "indices of another bound", "written indices")
OTHERWISE += ("indices written unseen", "written cast", "float16 cast", "computed cast")


@pytest.mark.parametrize("how", OTHERWISE)
@pytest.mark.parametrize("decision", [KEEP, SWAP])
def test_what_other_ops_have_made_is_swapped(how: str, decision: Decision) -> None:
    case = Formed(lambda: chosen("planned cast" if how.endswith("cast") else "planned indices"))
    plan, _ = planned(case, held(problem_of(case), decision))
    assert sum(value.bits and value.until >= 0 for value in plan.values) == 1
    assert followed(case, plan).total.fallbacks == 0
    assert _gradients(how, None) == _gradients(how, (plan, 1))


def _gradients(how: str, given: tuple[Plan, int] | None) -> list[bytes]:
    """The bytes of each gradient, in core, or under a plan that falls back so often."""
    torch.manual_seed(5)
    model, loss_of = chosen(how)
    if given is None:
        loss_of(model).backward()
    else:
        with poochplan.apply(given[0], model) as session:
            loss_of(model).backward()
        assert session.report().total.fallbacks == given[1]
    return [one.grad.numpy().tobytes() for one in model.parameters() if one.grad is not None]


def test_a_window_in_the_padding_has_an_index_beyond_the_plane_which_is_not_cut_off() -> None:
    """A pool of 2 by 128 elements whose window has padding alone: the index is 256 or more, so a byte is too small."""
    images = torch.randn(64, 4, 2, 128, requires_grad=True)
    kinds = {"kernel_size": 2, "stride": 1, "padding": 1, "dilation": 3}
    indices = nn.functional.max_pool2d(images, **kinds, return_indices=True)[1]
    assert int(indices.max()) >= 2 * 128

    def make() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model, batch = nn.Conv2d(1, 4, 1), torch.randn(64, 1, 2, 128)
        return model, lambda model: nn.functional.max_pool2d(model(batch).sin(), **kinds).nan_to_num(0, 0, 0).mean()

    plan, _ = planned(Formed(make), held(problem_of(Formed(make)), KEEP))
    assert [value.dtype for value in plan.values if value.bits] == ["uint8"]
    model, loss_of = make()
    with poochplan.apply(plan, model) as session:
        loss_of(model)
    assert session.report().total.fallbacks == 1


def test_indices_that_are_written_after_their_save_raise_what_autograd_raises() -> None:
    case = Formed(lambda: chosen("planned indices"))
    plan, _ = planned(case, held(problem_of(case), KEEP))
    model, loss_of = chosen("planned indices")
    made = list[torch.Tensor]()
    plain = model._indices  # type: ignore[operator]
    model._indices = lambda hidden: made.append(plain(hidden)) or made[-1]  # type: ignore[func-returns-value, assignment]
    with poochplan.apply(plan, model), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss = loss_of(model)
        made[0].add_(1)
        loss.backward()


@pytest.mark.parametrize(("form", "most"), [("uint8", 256), ("uint16", 65536), ("int32", 1 << 31)])
@pytest.mark.parametrize("count", [1, fewer_bytes.PART, fewer_bytes.PART + 3])
def test_integers_hold_all_indices_below_their_bound_and_no_others(form: str, most: int, count: int) -> None:
    indices = torch.randint(most, (count,))
    indices[-1] = most - 1
    made = narrow(indices.untyped_storage(), form)
    assert made is not None
    assert made.nbytes() == count * forms.FORM_BYTES[form]
    assert torch.equal(widen(on_whole(made, torch.uint8), count, form), indices)
    for wrong in (most, -1, 1 << 62):
        indices[count // 2] = wrong
        fits = form == "int32" and wrong == -1  # it is kept as it is
        assert (narrow(indices.untyped_storage(), form) is None) is not fits


def test_upper_halves_hold_every_pattern_of_bfloat16_and_no_other_of_float32() -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    wide = patterns.view(torch.bfloat16).float()
    made = narrow(wide.untyped_storage(), "bfloat16")
    assert made is not None
    assert torch.equal(on_whole(made, torch.int16), patterns)
    back = widen(on_whole(made, torch.uint8), len(patterns), "bfloat16")
    assert torch.equal(back.view(torch.int32), wide.view(torch.int32))
    assert int(wide.isnan().sum()) == 2 * 127
    wide.view(torch.int32)[7] += 1
    assert narrow(wide.untyped_storage(), "bfloat16") is None


def test_profile_and_runtime_know_the_same_ops() -> None:
    assert str(fewer_bytes.CASTING) == forms.CASTING
    assert {str(op): dims for op, dims in fewer_bytes.POOLING.items()} == forms.POOLING
    assert {str(op): choice.result for op, choice in fewer_bytes.CHOOSING.items()} == forms.CHOOSING
    assert {name: dtype.itemsize for name, dtype in fewer_bytes.DTYPES.items()} == forms.FORM_BYTES
    for op, choice in fewer_bytes.CHOOSING.items():
        (dim,) = (one for one in op._schema.arguments if one.name == "dim")
        assert dim.kwarg_only or op._schema.arguments[choice.argument].name == "dim"
        assert not dim.has_default_value() or dim.default_value == choice.default
    dilated = [op for op in fewer_bytes.POOLING if "adaptive" not in str(op)]
    assert {op._schema.arguments[fewer_bytes.DILATED].name for op in dilated} == {"dilation"}


def test_what_a_user_gives_has_no_narrow_form() -> None:
    def make() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        tokens, rows = torch.randint(100, (4096,)), torch.randn(4096, 64).to(torch.bfloat16)
        return nn.Embedding(100, 64), lambda model: (model(tokens) * rows.float()).square().mean()

    assert masks_of(Formed(make).profile()) == {}
