"""Static bytes are what one works out by hand, and the in-core peak is what an outside meter sees, and where it is."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from poochplan.formats.profile import Profile
from tests.live_bytes import peak_of_a_step
from tests.runtime.nets import CASES, Net, taken

Step = Callable[[], torch.Tensor]
UNIT = 512
VOCABULARY, WIDTH, BATCH, LENGTH = 1001, 37, 3, 11


def rounded(*sizes_bytes: int) -> int:
    return sum(-(-size // UNIT) * UNIT for size in sizes_bytes)


class Words(nn.Module):
    """A large embedding whose weight is the output's too, a norm with statistics, and a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.out.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens).mean(1))
        return self.out(torch.tanh(hidden))  # type: ignore[no-any-return]


PARAMETERS = (VOCABULARY * WIDTH * 4, WIDTH * 4, WIDTH * 4, VOCABULARY * 4)  # the tied weight once
BUFFERS = (WIDTH * 4, WIDTH * 4, 8, LENGTH * LENGTH)  # mean, variance, batches seen, mask
HELD = (BATCH * LENGTH * 8, BATCH * 8, 4)  # tokens, targets, and the loss of the step before

Optimizers = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "none": lambda parameters: None,
}
STATE = {
    "adamw": (*PARAMETERS, *PARAMETERS, *[4] * len(PARAMETERS)),  # two moments, and a count of steps
    "sgd": (),
    "momentum": PARAMETERS,
    "none": (),
}


def fresh(name: str) -> tuple[nn.Module, Step, torch.optim.Optimizer | None]:
    if name in CASES:
        return CASES[name].fresh()
    torch.manual_seed(0)
    model = Words()
    tokens, targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH)), torch.randint(0, VOCABULARY, (BATCH,))
    optimizer = Optimizers[name](model.parameters())  # type: ignore[no-untyped-call]
    return model, lambda: nn.functional.cross_entropy(model(tokens), targets), optimizer


@functools.cache
def profiled(name: str, accumulate: bool) -> Profile:
    model, step, optimizer = fresh(name)
    return taken(step, model, optimizer, accumulate=accumulate)


@pytest.mark.parametrize("name", Optimizers)
def test_static_bytes_of_each_kind_are_those_worked_out_by_hand(name: str) -> None:
    assert profiled(name, True).static_bytes == {
        "parameter": rounded(*PARAMETERS),
        "buffer": rounded(*BUFFERS),
        "gradient": rounded(*PARAMETERS),
        "optimizer_state": rounded(*STATE[name]),
        "input": rounded(*HELD),
    }


@pytest.mark.parametrize("accumulate", [False, True], ids=["zeroed", "accumulated"])
@pytest.mark.parametrize("name", [*Optimizers, *CASES])
def test_the_in_core_peak_is_what_an_outside_meter_sees(name: str, accumulate: bool) -> None:
    profile = profiled(name, accumulate)
    model, step, optimizer = fresh(name)
    peak_bytes = peak_of_a_step(model, step, optimizer, accumulate=accumulate)
    # The profile rounds each storage up to 512 bytes, the meter does not.
    assert peak_bytes <= profile.in_core_peak_bytes <= peak_bytes + UNIT * len(profile.values)
    assert profile.gradients_live_through_forward is accumulate


def test_the_peak_is_in_the_layer_that_takes_the_most_for_a_moment() -> None:
    def scaled(_: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = batch.unsqueeze(-1).expand(-1, -1, 4096).exp().mean()
        return batch * scale

    layers = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), Net(scaled), nn.Linear(32, 32)]
    model, batch = nn.Sequential(*layers), torch.randn(16, 32)
    profile = taken(lambda: model(batch).mean(), model)
    assert profile.in_core_peak_layer == "3"
    assert profile.in_core_peak_bytes >= 16 * 32 * 4096 * 4
    assert profile.to_frame("layers")["live_bytes"].idxmax() == "3"


def test_the_peak_is_in_the_embedding_whose_gradient_comes_last() -> None:
    model = nn.Sequential(nn.Embedding(20_000, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    tokens = torch.randint(0, 20_000, (8, 8))
    profile = taken(lambda: model(tokens).mean(), model)
    assert profile.in_core_peak_layer == "0"
    assert profile.to_frame("layers").loc["0", "live_bytes"] == profile.in_core_peak_bytes


class Masked(Words):
    """Takes a mask that it never reads, as FNet does with its attention mask."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(tokens)


@pytest.mark.parametrize("held", [True, False], ids=["made before the step", "made in the step"])
def test_an_argument_that_no_op_uses_counts_once(held: bool) -> None:
    torch.manual_seed(0)
    model, tokens = Masked(), torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones(BATCH, LENGTH)
    plain = taken(lambda: model(tokens).sum(), model)
    masked = taken(lambda: model(tokens, mask=mask if held else torch.ones(BATCH, LENGTH)).sum(), model)
    added = rounded(BATCH * LENGTH * 4) if held else 0
    assert masked.static_bytes["input"] == plain.static_bytes["input"] + added
