"""Integers and upper halves hold what fits into them and nothing else, at the bytes predicted."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats import forms
from poochplan.formats.narrow import masks_of
from poochplan.formats.plan import Decision
from poochplan.runtime.replays import fewer_bytes
from poochplan.runtime.replays.fewer_bytes import narrow, widen
from poochplan.tensors.storages import on_whole
from tests.processes import python
from tests.runtime.by_hand import held, planned, problem_of
from tests.runtime.form_nets import Formed
from tests.runtime.served import needs_compiler

KEEP, SWAP, RECOMPUTE = Decision


_METERED = """
import json
import torch
from tests.allocated_bytes import allocated_bytes
meter = allocated_bytes()  # before the package's allocator
import poochplan
from poochplan.formats.plan import Decision, Plan
from tests.runtime.by_hand import held, planned, problem_of
from tests.runtime.form_nets import FORMS
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
