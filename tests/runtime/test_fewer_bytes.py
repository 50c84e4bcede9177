"""Bits, integers and upper halves hold what fits into them and nothing else, and are widened to the very patterns; a
source that its step writes is held by no plan, and gives no wrong gradients against one.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats import forms, sources
from poochplan.formats import narrow as narrow_forms
from poochplan.formats.narrow import masks_of, narrowed, with_bits
from poochplan.formats.plan import Decision
from poochplan.formats.sources import sources_of
from poochplan.runtime.replays import bits, fewer_bytes
from poochplan.runtime.replays.fewer_bytes import narrow, widen
from poochplan.runtime.replays.replay import Birth, RecordedOp, StorageRecord
from poochplan.runtime.replays.running import run_ops
from poochplan.tensors.operators import Flat
from poochplan.tensors.storages import on_whole
from poochplan.torch_private import tensor_internals
from tests.processes import python
from tests.runtime.narrow_nets import MASKS, Formed
from tests.runtime.nets import Case, Net, followed, of
from tests.runtime.random_plans import held, planned, problem_of
from tests.runtime.served import needs_compiler

KEEP, SWAP, RECOMPUTE = Decision


_METERED = """
import json
import torch
from tests.allocated_bytes import allocated_bytes
meter = allocated_bytes()  # before the package's allocator
import poochplan
from poochplan.formats.plan import Decision, Plan
from tests.runtime.random_plans import held, planned, problem_of
from tests.runtime.narrow_nets import FORMS
from tests.runtime.nets import without_costs
torch.set_num_threads(1)
without_costs()
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


def test_a_window_in_the_padding_has_an_index_beyond_the_plane_which_is_not_cut_off() -> None:
    """A pool of 2 by 128 elements whose window has padding alone: the index is 256 or more, so a byte is too small.

    The profile's step has windows that lie on elements: PyTorch's backward writes to such an index, beyond the end of
    the gradient.
    """
    on_elements = {"kernel_size": 4, "stride": 1, "padding": 1}
    on_padding = {"kernel_size": 2, "stride": 1, "padding": 1, "dilation": 3}
    images = torch.randn(64, 4, 2, 128)
    output, indices = nn.functional.max_pool2d(images, **on_padding, return_indices=True)
    assert int(indices.max()) >= 2 * 128
    assert output.shape == nn.functional.max_pool2d(images, **on_elements).shape
    windows = on_elements

    def make() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model, batch = nn.Conv2d(1, 4, 1), torch.randn(64, 1, 2, 128)
        return model, lambda model: nn.functional.max_pool2d(model(batch).sin(), **windows).nan_to_num(0, 0, 0).mean()

    plan, _ = planned(Formed(make), held(problem_of(Formed(make)), KEEP))
    assert [value.dtype for value in plan.values if value.bits] == ["uint8"]
    model, loss_of = make()
    windows = on_padding
    with poochplan.apply(plan, model) as session:
        loss_of(model)
    assert session.report().total.fallbacks == 1


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


def test_what_a_user_gives_has_no_narrow_form() -> None:
    def make() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        tokens, rows = torch.randint(100, (4096,)), torch.randn(4096, 64).to(torch.bfloat16)
        return nn.Embedding(100, 64), lambda model: (model(tokens) * rows.float()).square().mean()

    assert masks_of(Formed(make).profile()) == {}


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


def test_bits_are_added_once() -> None:
    profile = MASKS["float32"].profile()
    once = with_bits(profile)
    assert with_bits(once) is once
    assert len(narrowed(once)) == 12
    assert len(once.points) == len(profile.points) + 12
    assert len(once.ops) == len(profile.ops) + 12
    assert len(once.values) == len(profile.values) + 12
    assert json.loads(msgspec.json.encode(profile)) == json.loads(msgspec.json.encode(MASKS["float32"].profile()))


def names_of(ops: Iterable[object]) -> set[str]:
    return set(map(str, ops))


def test_profile_and_runtime_know_the_same_ops() -> None:
    assert names_of(tensor_internals.WIDENING) == sources.WIDENING
    assert str(bits.DRAWING) == narrow_forms.DRAWING
    assert names_of(bits.MAKING) == narrow_forms.MAKING
    assert names_of(bits.SCALING) == narrow_forms.SCALING
    assert {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in bits._INTEGERS} == narrow_forms.ELEMENT_BYTES
    assert str(fewer_bytes.CASTING) == forms.CASTING
    assert {name: dtype.itemsize for name, dtype in fewer_bytes.DTYPES.items()} == forms.FORM_BYTES


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
