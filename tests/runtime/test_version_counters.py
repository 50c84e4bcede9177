"""A write that was recorded is told from one that was not, whether torch counts it or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from poochplan.runtime.replays.replay import OFF, StorageRecord
from poochplan.runtime.replays.tape import Recorder, Tape
from tests.programs.drawing import draw
from tests.programs.other_trials import served_trial
from tests.runtime.served import needs_compiler

Write = Callable[[torch.Tensor], object]


def above_autograd(tensor: torch.Tensor) -> None:
    """As a user's code writes: torch counts it."""
    tensor.copy_(torch.arange(8.0))


def below_autograd(tensor: torch.Tensor) -> None:
    """As a kernel writes what it has allocated itself: torch does not count it."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        tensor.copy_(torch.arange(8.0))


def two_parts_in_one_call(tensor: torch.Tensor) -> None:
    """Counted twice, on one counter."""
    torch._foreach_add_([tensor[:4], tensor[4:]], 1.0)


WRITES = [above_autograd, below_autograd, two_parts_in_one_call]


def _switch_on(recorder: Recorder) -> None:
    """The op in which recording was asked for is over."""
    recorder.switch_on()
    torch.ones(1).neg()


def recorded(tensor: torch.Tensor, *writes: Write) -> tuple[Tape, StorageRecord]:
    tape = Tape("cpu")
    recorder = Recorder(tape)
    _switch_on(recorder)
    for write in writes:
        write(tensor)
    recorder.switch_off()
    return tape, tape.record_of(tensor)


def met_later(tape: Tape, tensor: torch.Tensor) -> StorageRecord:
    """As it is packed where nothing is recorded."""
    return tape.met(tensor, tensor.untyped_storage(), OFF)


@pytest.mark.parametrize("first", WRITES)
@pytest.mark.parametrize("second", WRITES)
def test_recorded_writes_are_all_that_there_were(first: Write, second: Write) -> None:
    tensor = torch.empty(8)
    tape, _ = recorded(tensor, first, second)
    record = met_later(tape, tensor)
    assert not record.broken
    assert len(record.writes) == 2
    assert None not in record.writes


@pytest.mark.parametrize("first", WRITES)
def test_a_write_behind_them_that_was_not_recorded_is_noticed(first: Write) -> None:
    tensor = torch.empty(8)
    tape, _ = recorded(tensor, first)
    tensor.mul_(2.0)
    record = met_later(tape, tensor)
    assert record.broken
    assert record.writes[-1] is None


def test_one_that_torch_counts_is_noticed_in_the_window_too() -> None:
    tensor = torch.empty(8)
    tape, record = recorded(tensor, above_autograd)
    recorder = Recorder(tape)
    _switch_on(recorder)
    below_autograd(tensor)
    recorder.switch_off()
    tensor.add_(1.0)
    assert met_later(tape, tensor) is record
    assert record.broken


@needs_compiler
def test_a_program_whose_casts_write_below_autograd_is_served_in_every_step() -> None:
    assert served_trial(draw(82)).problems == []


def test_what_is_told_of_a_write_beside_a_recorded_one_breaks_the_record() -> None:
    def and_by_hand(tensor: torch.Tensor) -> None:
        tensor.mul_(2.0)
        tensor.numpy()[:] += 1.0
        torch.autograd.graph.increment_version(tensor)

    tensor = torch.ones(8)
    tape, _ = recorded(tensor, and_by_hand)
    assert met_later(tape, tensor).broken
