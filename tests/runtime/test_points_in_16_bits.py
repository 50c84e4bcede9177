"""In 16 bits a point in compiled code rounds nothing that stock Inductor does not round there."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from poochplan.compiling.rounds import bits_of_a_step
from poochplan.formats.run_record import StepDigests
from poochplan.runtime.compiled.inductor import GraphBackend, compiled_deferring
from tests.runtime.served import needs_compiler

pytestmark = [needs_compiler, pytest.mark.cpu_device]


class ScaledBeforeItsProduct(nn.Module):
    """Something reads a tensor before the product that has it in memory, through a view that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.first(batch))
        scaled = hidden * 1.7
        return self.last(hidden) + scaled  # type: ignore[no-any-return]


class GatedBeforeItsProduct(nn.Module):
    """The same of a gradient in backward, beside what is deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(32, 32), nn.Linear(32, 32)
        self.scale, self.weight = nn.Parameter(torch.randn(4, 8, 32)), nn.Parameter(torch.randn(32))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        gate = self.gate(batch).tanh()
        return (self.layer(batch) + gate * self.scale).sigmoid() * self.weight


class Both(nn.Module):
    """The two together: the compiler fuses otherwise where there are deferred unpacks, wherever they are anchored."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = (nn.Linear(32, 32) for _ in range(3))
        self.scale, self.weight = nn.Parameter(torch.randn(4, 8, 32)), nn.Parameter(torch.randn(32))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.first(batch) + self.gate(batch).tanh() * self.scale
        batch = nn.functional.gelu(batch.sigmoid() * self.weight)
        scaled = batch * 1.7
        return self.last(batch) + scaled  # type: ignore[no-any-return]


@functools.cache
def bits(network: type[nn.Module], how: str) -> StepDigests:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = network().bfloat16(), torch.randn(4, 8, 32, dtype=torch.bfloat16)
    options: dict[str, Any] = {"backend": GraphBackend()} if how == "graph mode" else {}
    model.compile(dynamic=False, **options)
    with compiled_deferring(model, "cpu") if how == "deferred unpacks" else contextlib.nullcontext(), fresh_cache():
        return bits_of_a_step(lambda: model(batch).float().square().mean(), model, None)


@pytest.mark.parametrize(
    ("network", "how"),
    [(ScaledBeforeItsProduct, "graph mode"), (GatedBeforeItsProduct, "graph mode"), (Both, "deferred unpacks")],
)
def test_all_bits_are_those_of_stock_code(network: type[nn.Module], how: str) -> None:
    assert bits(network, how) == bits(network, "stock")
