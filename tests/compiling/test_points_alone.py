"""Points in compiled code, with nothing swapped or recomputed: loss and gradients are those of stock Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache

from poochplan.compiling.rounds import bits_of_a_step
from poochplan.runtime.compiled.inductor import GraphBackend
from tests.runtime.served import needs_inductor
from tests.runtime.third_party_networks import NETWORKS

pytestmark = [needs_inductor, pytest.mark.cpu_device, pytest.mark.deep]
NAMES = ("bert", "roberta", "electra", "llama", "gpt2", "t5", "vit", "resnet", "convnext", "swin")


def bits(name: str, precision: str, backend: str | Callable[..., Any]) -> dict[str, str]:
    torch._dynamo.reset()
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    torch.set_default_dtype(dtype)  # of the batch too
    try:
        model, loss_of, _ = NETWORKS[name].fresh()
    finally:
        torch.set_default_dtype(torch.float32)
    model.to(dtype).compile(backend=backend, dynamic=False)

    def step() -> torch.Tensor:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return loss_of()

    with fresh_cache():
        return bits_of_a_step(step, model, None)


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_all_bits_are_those_of_stock_code(name: str, precision: str) -> None:
    assert bits(name, precision, GraphBackend()) == bits(name, precision, "inductor")
