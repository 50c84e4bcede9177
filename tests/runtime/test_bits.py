"""Bits of a mask are numpy's, and are widened to the very patterns that were narrowed."""

from __future__ import annotations

import json
import weakref

import msgspec
import numpy as np
import pytest
import torch

from poochplan.formats import narrow as formats
from poochplan.formats.narrow import narrowed, with_bits
from poochplan.runtime.replays import bits
from poochplan.runtime.replays.replay import Birth, RecordedOp, StorageRecord, run_ops
from poochplan.tensors.operators import Flat
from tests.runtime.mask_nets import MASKS


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
