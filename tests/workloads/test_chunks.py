"""Long text read in chunks: the state goes on, gradients do not; and the texts have the sizes that they should."""

from __future__ import annotations

import pytest
import torch

from poochplan.errors import UsageError
from poochplan.workloads.sequence import TEXT_BYTES, TextName, char_rnn, text_of
from tests.workloads.small import losses

ONE = {"batch_size": 3, "width": 16, "dropout": 0.0, "lr": 0.0, "optimizer": "sgd"}


def test_chunks_read_what_one_long_sequence_reads() -> None:
    short = torch.stack(losses(char_rnn(**ONE, sequence_length=10, chunks=4), 4))
    (whole,) = losses(char_rnn(**ONE, sequence_length=20, chunks=2), 1)
    (rest,) = losses(char_rnn(**ONE, sequence_length=40, chunks=2), 1)
    assert torch.allclose(short[:2].mean(), whole, rtol=1e-6)
    assert torch.allclose(short.mean(), rest, rtol=1e-6)


def test_a_chunk_begins_in_the_state_in_which_the_one_before_ended() -> None:
    first, second, *_ = losses(char_rnn(**ONE, sequence_length=10, chunks=4), 4)
    forgetful = char_rnn(**ONE, sequence_length=10, chunks=4)
    losses(forgetful, 1)
    forgetful.step.state = tuple(torch.zeros_like(part) for part in forgetful.step.state)
    assert not torch.equal(losses(forgetful, 1)[0], second)
    assert not torch.equal(first, second)


def test_unrolled_steps_compute_what_the_fused_layers_do() -> None:
    fused, steps = (
        char_rnn(**ONE, layers=2, sequence_length=10, chunks=2, unrolled=unrolled) for unrolled in (False, True)
    )
    theirs = dict(fused.model.named_parameters())
    for name, parameter in steps.model.named_parameters():
        _, cells, layer, weight = ([*name.split("."), "", ""])[:4]
        parameter.data.copy_(theirs[f"lstm.{weight}_l{layer}" if cells == "cells" else name])
    for ours, reference in zip(losses(steps, 4), losses(fused, 4), strict=True):
        assert torch.allclose(ours, reference, rtol=1e-5)
    assert len(list(steps.model.parameters())) == len(theirs)


def test_an_epoch_over_the_rows_begin_anew() -> None:
    found = losses(char_rnn(**ONE, sequence_length=10, chunks=4), 12)
    assert all(torch.equal(found[step], found[step % 4]) for step in range(12))
    assert len({loss.item() for loss in found}) == 4


def test_no_gradient_flows_through_the_state() -> None:
    workload = char_rnn(**ONE, sequence_length=10, chunks=4)
    first = workload.step()
    second = workload.step()
    second.backward()
    gradient = workload.model.embedding.weight.grad.clone()
    assert not any(part.requires_grad for part in workload.step.state)
    workload.model.zero_grad()
    first.backward()  # its graph is whole: the second one was not a part of it
    assert not torch.equal(workload.model.embedding.weight.grad, gradient)


def test_as_many_chunks_as_the_text_has_read_it_but_for_less_than_a_chunk_a_row() -> None:
    workload = char_rnn(**ONE, text="small", sequence_length=1000, chunks=0)
    assert len(workload.step.batches) == 95 - 1  # 3 rows of 95,000, the last character only predicted


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_text_of_a_stated_size_has_it_and_is_the_same_each_time(name: TextName) -> None:
    text = text_of(name)
    assert len(text) == len(text.encode("ascii")) == TEXT_BYTES[name]
    assert text == text_of(name)
    assert 60 < len(set(text)) < 128


def test_the_large_text_goes_on_where_the_small_one_ends() -> None:
    assert text_of("large").startswith(text_of("small"))


@pytest.mark.parametrize("chunks", [10_000, -1])
def test_more_chunks_than_the_text_has_are_refused(chunks: int) -> None:
    with pytest.raises(UsageError, match=r"expected less than the text's 95000 characters a row, found .* read less"):
        char_rnn(**ONE, text="small", sequence_length=10, chunks=chunks)
