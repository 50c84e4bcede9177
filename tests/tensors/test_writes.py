"""What an operator's call writes, as capture and recorder both hear it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poochplan.tensors.operators import Writes, traits, writes_of
from poochplan.tensors.storages import storage_key

ATEN = torch.ops.aten


def written(func: Any, *args: Any, static: tuple[torch.Tensor, ...] = (), **kwargs: Any) -> Writes:
    return writes_of(traits(func), args, kwargs, static=set(map(storage_key, static)), device_type="cpu")


def same(found: list[torch.Tensor], *expected: torch.Tensor) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


def batch_norm(means: torch.Tensor | None, variances: torch.Tensor | None, *, training: bool) -> tuple[Any, ...]:
    return torch.ones(4, 3), None, None, means, variances, training, 0.1, 1e-5


def test_what_an_operator_declares_is_written_in_place_by_name_and_each_of_a_list() -> None:
    one, other = torch.ones(2), torch.ones(3)
    assert written(ATEN.add.Tensor, one, one) == Writes([], {}, None, True)
    writes = written(ATEN.add_.Tensor, one, torch.ones(2))
    assert same(writes.in_place, one)
    assert writes.overwritten is None  # it is read
    assert same(written(ATEN.add.out, torch.ones(2), torch.ones(2), out=one).in_place, one)
    assert same(written(ATEN._foreach_mul_.Scalar, [one, other], 2.0).in_place, one, other)


@pytest.mark.parametrize(
    ("target", "whole"),
    [
        (torch.empty(6), True),
        (torch.empty(2, 3).t(), True),
        (torch.empty(6)[:3], False),
        (torch.empty(6)[::2], False),
        (torch.empty(1).expand(1), True),
        (torch.empty(3, 2).as_strided((6,), (0,)), False),
        (torch.zeros(2, dtype=torch.complex64).conj(), False),
    ],
)
def test_a_fill_overwrites_the_storage_that_its_target_covers(target: torch.Tensor, whole: bool) -> None:
    writes = written(ATEN.fill_.Scalar, target, 1.0)
    assert same(writes.in_place, target)
    assert (writes.overwritten is target) == whole


def test_running_statistics_are_scratch_to_a_replay_or_no_buffers_are_written_and_the_call_is_not_repeated() -> None:
    means, variances = torch.zeros(3), torch.ones(3)
    args = batch_norm(means, variances, training=True)
    writes = written(ATEN.native_batch_norm.default, *args, static=(means, variances))
    assert writes == Writes([], {3: means, 4: variances}, None, True)
    writes = written(ATEN.native_batch_norm.default, *args, static=(means,))
    assert same(writes.in_place, variances)
    assert set(writes.scratch) == {3, 4}
    assert not writes.repeatable


@pytest.mark.parametrize("training", [False, True])
def test_statistics_that_are_only_read_or_not_there_are_not_written(training: bool) -> None:
    means, variances = (None, None) if training else (torch.zeros(3), torch.ones(3))
    args = batch_norm(means, variances, training=training)
    assert written(ATEN.native_batch_norm.default, *args) == Writes([], {}, None, True)


def test_an_operator_of_another_namespace_is_not_repeated() -> None:
    @torch.library.custom_op("poochplan_writes::twice", mutates_args=("out",))
    def twice(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(2 * x)

    out = torch.empty(2)
    writes = written(torch.ops.poochplan_writes.twice.default, torch.ones(2), out)
    assert same(writes.in_place, out)
    assert not writes.repeatable


def test_dropout_between_the_layers_of_cudnns_rnn_writes_the_state_of_its_generator() -> None:
    state, inputs = torch.zeros(8), torch.zeros(2, 1, 4)

    def of(dropout: float, train: bool, state: torch.Tensor | None) -> list[torch.Tensor]:
        sizes = (2, 4, 0, 2)  # LSTM, hidden, no projection, layers
        arguments = (inputs, [inputs], 4, None, inputs, inputs, *sizes, False, dropout, train, False, [], state)
        assert len(arguments) == len(ATEN._cudnn_rnn.default._schema.arguments)
        return written(ATEN._cudnn_rnn.default, *arguments).in_place

    assert same(of(0.5, True, state), state)
    assert of(0.0, True, state) == of(0.5, False, state) == of(0.5, True, None) == []
