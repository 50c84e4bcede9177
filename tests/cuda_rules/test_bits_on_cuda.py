"""On CUDA too bits stand for masks, which ops of torch narrow and widen: the bits and bytes are those of the plan."""

from __future__ import annotations

import gc

import msgspec
import numpy as np
import pytest
import torch

import poochplan
from poochplan.formats import narrow
from poochplan.formats.plan import Decision
from poochplan.runtime.replays import bits
from poochplan.tensors.storages import on_whole
from tests.cuda_rules.machine import WHERE, Machine
from tests.cuda_rules.streams import Stream
from tests.planner.checker import check
from tests.planner.mask_profiles import on_cuda
from tests.planner.test_masks import dropout
from tests.runtime.by_hand import held, planned, problem_of, with_slow_copies
from tests.runtime.mask_nets import masks_on
from tests.runtime.nets import as_bytes, followed, metered_peaks, train

COUNTS = {"float32": 6, "bfloat16": 3, "bools, float32": 9, "bools, bfloat16": 7}
"""Dropout of attention reads what is saved anyway: 16 bits of it are drawn again in less time than they are widened."""
CASES = masks_on(WHERE)
SCALES = (torch.ops.aten.div_.Scalar, 0.7), (torch.ops.aten.mul_.Scalar, -3)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("decision", Decision)
def test_bits_are_held_or_swapped_in_place_of_a_mask_or_it_is_drawn_again(
    gpu: Machine, name: str, decision: Decision
) -> None:
    case = CASES[name]
    plan, found = planned(case, held(problem_of(case), decision))
    assert sum(value.name.endswith(" as bits") for value in plan.values) == COUNTS[name]
    assert followed(case, plan, 3, wanted=train(case, 3)[0]).last_step.replayed_values >= COUNTS[name]
    assert metered_peaks(case, plan)[1] <= found.simulation.peak_bytes
    assert check(case.profile(), plan).peak_bytes == found.simulation.peak_bytes


@pytest.mark.parametrize("name", ["bools, float32", "bools, bfloat16"])
def test_plans_hold_the_bits_of_dropouts_masks_within_the_budget(gpu: Machine, name: str) -> None:
    case, found = CASES[name], []
    profile = with_slow_copies(case.profile())
    smallest = poochplan.smallest_budget(profile)
    budget_bytes = smallest + (profile.in_core_peak_bytes - smallest) // 8
    plan = poochplan.plan(profile, budget_bytes, evaluations=300, gap=0.0)
    assert any(value.bits and value.until >= 0 for value in plan.values)
    assert not any(value.bits for value in poochplan.plan(profile, budget_bytes, without=["narrow"]).values)
    gc.collect()
    before_bytes = gpu.memory.now["requested_bytes"]
    assert max(metered_peaks(case, plan)) <= plan.prediction.peak_bytes <= budget_bytes
    gc.collect()
    assert gpu.memory.now["requested_bytes"] == before_bytes  # no table is left
    for given in (None, plan):
        seen = train(case, 2, given, meter="never")[0]  # the meter would see what is kept of each step
        found.append([as_bytes(one.cpu()) for step in seen for one in step])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", bits._INTEGERS)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1023, 1024, 1025, 5000])
def test_narrowing_gives_numpys_bits_and_widening_the_very_patterns_at_the_bytes_planned(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int
) -> None:
    for module in (bits, narrow):
        monkeypatch.setattr(module, "DEVICE_PART", 1024)
    drawn, scales = torch.rand(count) < 0.6, () if dtype is torch.bool else SCALES
    mask = drawn.to(WHERE).to(dtype)
    for scale, factor in scales:
        scale(mask, factor)
    table, waits, name = bits._device_table(WHERE, dtype, scales), list[Stream](), str(dtype).removeprefix("torch.")
    profile = on_cuda(dropout())
    (masked,) = narrow.masks_of(profile).values()
    values = [msgspec.structs.replace(one, dtype=name, size_bytes=mask.nbytes) for one in profile.values]
    foreseen = narrow._workspace_bytes(msgspec.structs.replace(profile, values=tuple(values)), masked)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "synchronise", waits.append)
        before_bytes = gpu.memory.now["requested_bytes"]
        gpu.memory.begin_peaks()
        made = bits.narrow(mask.untyped_storage(), dtype, table)
        narrowing_bytes = gpu.memory.peaks["requested_bytes"] - before_bytes
        assert made is not None
        packed = on_whole(made, torch.uint8)
        before_bytes = gpu.memory.now["requested_bytes"]
        gpu.memory.begin_peaks()
        back = bits.widen(packed, count, dtype, table)
        widening_bytes = gpu.memory.peaks["requested_bytes"] - before_bytes
    assert waits == []
    assert packed.tolist() == np.packbits(drawn.numpy(), bitorder="little").tolist()
    integer = bits._INTEGERS[dtype][0]
    assert torch.equal(back.view(integer), mask.view(integer))
    assert narrowing_bytes == foreseen[0]
    assert widening_bytes - profile.rounded_bytes(mask.nbytes) <= foreseen[1]
