"""``profile(backward="inside")``: a step that does all of it itself, profiled as one that returns its loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import poochplan
from poochplan.formats.profile import Phase
from poochplan.formats.queries import saved_values
from tests.online.trainings import Training, accumulation, autocast, dropout_and_batch_norm
from tests.runtime.nets import CASES, LINK
from tests.runtime.served import needs_compiler


@pytest.mark.parametrize("make", [dropout_and_batch_norm, autocast, accumulation])
def test_everything_is_restored(make: Callable[[], Training]) -> None:
    training = make()
    training.turn(0)  # the optimizer has its state
    before = training.state()
    of = {"model": training.model, "optimizer": training.optimizers[0]}
    poochplan.profile(lambda: training.turn(1), backward="inside", link=LINK, **of)
    after = training.state()
    assert len(after) == len(before)
    assert all(map(torch.equal, after, before))
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_what_may_be_done_with_it_and_the_in_core_peak_are_those_of_a_step_function(name: str) -> None:
    model, step, optimizer = CASES[name].fresh()

    def whole() -> None:
        optimizer.zero_grad()
        step().backward()
        optimizer.step()

    inside = poochplan.profile(whole, model=model, optimizer=optimizer, backward="inside", link=LINK)
    outside = CASES[name].profile()
    known, there = (sum(value.size_bytes for value in one.values if value.born < 0) for one in (outside, inside))
    beside = there - known  # other tensors of this process, which only the loop's own profile counts
    assert inside.in_core_peak_bytes - beside == pytest.approx(outside.in_core_peak_bytes, abs=512 * 64)
    forward = [op.name for op in outside.ops if op.phase is Phase.FORWARD]
    assert [op.name for op in inside.ops][: len(forward)] == forward
    assert [handle.dtype for handle in inside.handles] == [handle.dtype for handle in outside.handles]
    for one, other in zip(saved(inside), saved(outside), strict=True):
        assert (one.size_bytes, one.dtype, one.shape) == (other.size_bytes, other.dtype, other.shape)
        assert (one.kind, one.pinned, one.unreplayable) == (other.kind, other.pinned, other.unreplayable)


def saved(profile: poochplan.Profile) -> list[poochplan.formats.profile.Value]:
    return [profile.values[number] for number in saved_values(profile)]
