"""All or nothing: where putting back fails, the rest is put back all the same, and what differs is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poochplan.errors import StepError
from poochplan.profiler.step.preserve import Kept, kept_contents, kept_generators, preserved, restored
from tests.profiler.restoring import Net, everything, train


class Refuses(dict[str, Any]):
    """A table that cannot be emptied once its owner says so."""

    refuses = False

    def clear(self) -> None:
        if self.refuses:
            raise ValueError("this table stays")
        super().clear()


def test_where_one_action_fails_the_others_are_done_and_the_error_names_it() -> None:
    model = Net()
    table = model.first.__dict__["_buffers"] = Refuses()
    optimizer = torch.optim.Adam(model.parameters())
    before = everything(model, optimizer)
    with pytest.raises(StepError, match=r"could not restore module first \(ValueError: this table stays\); build"):
        with preserved(model, optimizer):
            model.first.register_buffer("new", torch.ones(2))
            train(model, optimizer)
            table.refuses = True
    del table["new"]
    assert everything(model, optimizer) == before


class Ignores(dict[str, Any]):
    """A table that takes no update, and says nothing."""

    deaf = False

    def update(self, *args: Any, **kwargs: Any) -> None:
        if not self.deaf:
            super().update(*args, **kwargs)


def test_what_differs_although_nothing_raised_is_named() -> None:
    model = Net()
    model.norm.__dict__["_buffers"] = Ignores(model.norm._buffers)
    with pytest.raises(StepError, match="could not restore module norm; build model and optimizer anew"):
        with preserved(model, None):
            model.norm._buffers.deaf = True
            del model.norm._buffers["running_mean"]


def test_the_checksum_tells_every_single_bit_and_names_the_tensor() -> None:
    tensors = {"a": torch.randn(100), "b": torch.ones(3, dtype=torch.int8)}
    contents = kept_contents(tensors.items())
    for name, tensor in tensors.items():
        raw = tensor.view(torch.uint8)
        for index in range(raw.numel()):
            raw[index] ^= 1 << index % 8
            assert [part.name for part in contents if not part.is_back()] == [name]
            raw[index] ^= 1 << index % 8
    assert all(part.is_back() for part in contents)


def test_an_interrupt_while_restoring_waits_until_all_is_back() -> None:
    log: list[str] = []

    def interrupted_half_way() -> None:
        log.append("first")
        if len(log) == 1:
            raise KeyboardInterrupt

    first = Kept("first", interrupted_half_way, lambda: True)
    second = Kept("second", lambda: log.append("second"), lambda: True)
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt), restored([first, second, *kept_generators()]):
        torch.rand(3)
    assert log == ["first", "first", "second"]
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_of_the_step_stays_with_that_of_the_restoring() -> None:
    model = Net()
    model.norm.__dict__["_buffers"] = Ignores(model.norm._buffers)
    with pytest.raises(StepError, match="could not restore module norm") as raised, preserved(model, None):
        model.norm._buffers.deaf = True
        del model.norm._buffers["running_mean"]
        raise ValueError("the step's own")
    assert str(raised.value.__context__) == "the step's own"
