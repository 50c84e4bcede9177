"""The key of a graph: the same for the same code, another wherever a plan's names could mean something else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.runtime.graph_nets import Chain, Make, MovingScale, channels_last, node_by_node, of

pytestmark = pytest.mark.cpu_device


def key_of(make: Make) -> str:
    _, noted = node_by_node(make)
    (key,) = noted.why
    return key


def test_the_same_network_has_the_same_key_with_other_weights_and_its_replays_in_it() -> None:
    key = key_of(of(Chain))

    def others() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(7)
        return of(Chain)()

    assert key_of(others) == key
    _, noted = node_by_node(of(Chain))
    _, replayed = node_by_node(of(Chain), noted.replayable())
    assert list(replayed.why) == [key]


def other_batch() -> tuple[nn.Module, torch.Tensor]:
    return Chain(), torch.randn(32, 16)


def other_type() -> tuple[nn.Module, torch.Tensor]:
    return Chain().double(), torch.randn(64, 16).double()


def frozen() -> tuple[nn.Module, torch.Tensor]:
    model, batch = of(Chain)()
    model.norm.requires_grad_(False)  # type: ignore[union-attr]
    return model, batch


def contiguous() -> tuple[nn.Module, torch.Tensor]:
    model, batch = channels_last()
    return model.to(memory_format=torch.contiguous_format), batch.contiguous()


def test_other_code_has_another_key() -> None:
    makes = [of(Chain), other_batch, other_type, of(MovingScale), channels_last, contiguous]
    assert len({key_of(make) for make in makes}) == len(makes)


def test_what_a_frozen_layer_saves_less_is_in_the_key() -> None:
    assert key_of(frozen) != key_of(of(Chain))
