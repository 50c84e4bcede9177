"""A step that runs forward again in backward is seen to, whatever way it does so, and no other step is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import poochplan
from tests.runtime.nets import Net, taken


def network(call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Net:
    """Three blocks, of which two are called as ``call`` says."""

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        for block in net.blocks[:2]:
            batch = call(block, batch)
        return net.blocks[2](batch)  # type: ignore[no-any-return]

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
    return Net(body, blocks=blocks)


def _facts(model: nn.Module, mode: Any = "run") -> poochplan.Profile:
    batch = torch.randn(8, 16, requires_grad=True)
    return taken(lambda: model(batch).square().mean(), model, mode=mode)


@pytest.mark.parametrize("mode", ["run", "swap-all"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_in_the_profile_and_its_advice(reentrant: bool, mode: str) -> None:
    profile = _facts(network(lambda block, batch: checkpoint(block, batch, use_reentrant=reentrant)), mode)
    assert profile.facts.checkpointed == ("blocks.1", "blocks.0")
    assert any("activation checkpointing is on (blocks.1 and 1 more" in line for line in profile.advice())
    assert poochplan.plan(profile, "100%").budget_bytes > 0


def test_a_checkpointed_function_outside_all_modules_is_seen() -> None:
    profile = _facts(
        network(lambda block, batch: checkpoint(lambda x: x.sin().exp(), block(batch), use_reentrant=False))
    )
    assert len(profile.facts.checkpointed) > 0


def test_a_checkpointed_sequence_is_seen() -> None:
    profile = _facts(network(lambda block, batch: checkpoint_sequential(list(block), 3, batch, use_reentrant=False)))
    assert profile.facts.checkpointed[-1].startswith("blocks.0.")


def test_compiled_blocks_within_checkpoints_are_seen() -> None:
    torch._dynamo.reset()
    model = network(lambda block, batch: checkpoint(block, batch, use_reentrant=False))

    class Block(nn.Sequential):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self[1](self[0](batch))

    model.blocks[0] = torch.compile(Block(nn.Linear(16, 16), nn.Tanh()), backend="aot_eager")  # type: ignore[assignment]
    profile = _facts(model)
    assert profile.facts.checkpointed == ("blocks.1", "blocks.0")
    torch._dynamo.reset()


def test_plain_steps_and_backwards_written_by_hand_are_not_checkpointed() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(batch)
            return batch**3

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (batch,) = ctx.saved_tensors
            return gradient * 3 * batch**2

    profile = _facts(network(lambda block, batch: Cube.apply(block(batch))))
    assert profile.facts.checkpointed == ()
    assert (profile.facts.modules, profile.facts.eval_modules) == (14, 0)
