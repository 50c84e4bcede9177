"""Each of torch's optimizers has the bits of plain steps where its state is away between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.optimizer_state.trainings import SIDE, Layers, Training, chunks, either_way, grouped

NAMES = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]


def made(name: str, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    if name == "SGD":
        options = {"momentum": 0.9, **options}
    found: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **{"lr": 1e-2, **options})
    return found


def trains(training: Training) -> None:
    for _ in range(3):
        training.step()
        assert training.is_streamed()


def same(name: str, model: Callable[[], nn.Module] = Layers, **options: Any) -> None:
    either_way(trains, lambda parameters: made(name, parameters, **options), model)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_in_a_loop_over_parameters_and_in_lists_of_them(name: str, foreach: bool) -> None:
    same(name, foreach=foreach)


@pytest.mark.parametrize("name", FUSED)
def test_in_one_kernel(name: str) -> None:
    same(name, fused=True)


class Stacked(nn.Module):
    """A vector whose second moments are not in factors, which Adafactor has of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(SIDE * SIDE) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            rows = (rows @ scale.view(SIDE, SIDE)).tanh()
        return rows.square().mean()


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor(foreach: bool) -> None:
    same("Adafactor", Stacked, foreach=foreach)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"amsgrad": True, "maximize": True, "weight_decay": 0.1}),
        ("Adam", {"amsgrad": True, "fused": True, "weight_decay": 0.1}),
        ("Adam", {"lr": torch.tensor(1e-2), "foreach": False}),
        ("AdamW", {"lr": torch.tensor(1e-2), "fused": True}),
        ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
        ("SGD", {"nesterov": True, "weight_decay": 0.1}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
        ("Adagrad", {"initial_accumulator_value": 0.5}),
        ("Rprop", {"maximize": True}),
        ("ASGD", {"t0": 1.0, "weight_decay": 0.1}),
        ("Adamax", {"maximize": True, "weight_decay": 0.1}),
    ],
)
def test_with_what_optimizers_can_be_told(name: str, options: dict[str, Any]) -> None:
    same(name, **options)


@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad", "Adadelta"])
def test_in_two_groups_with_other_rates(name: str) -> None:
    either_way(trains, lambda parameters: made(name, grouped(parameters, lr=3e-3, weight_decay=0.1)))


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop"])
def test_in_bfloat16(name: str) -> None:
    same(name, BFloat16)


class BFloat16(nn.Module):
    """State of two bytes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(2 * SIDE, SIDE, dtype=torch.bfloat16) / SIDE for _ in range(5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            rows = (rows @ weight.t()).tanh() @ weight
        return rows.square().mean()


class ChannelsLast(nn.Module):
    """State with the strides of channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(64, 32, 3, padding=1) for _ in range(4))
        self.back = nn.Conv2d(32, 64, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        images = rows.view(1, 2, 16, 16).expand(4, 2, 16, 16).repeat(1, 32, 1, 1)
        for layer in self.layers:
            images = images + self.back(layer(images)).tanh()
        return images.square().mean()


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_with_the_strides_of_channels_last(name: str) -> None:
    strides = list[bool]()

    def looks(training: Training) -> None:
        trains(training)
        strides.extend(one.is_contiguous(memory_format=torch.channels_last) for one in training.away())

    either_way(looks, lambda parameters: made(name, parameters), ChannelsLast)
    assert strides
    assert all(strides)


@pytest.mark.parametrize("each", [1, 3, 12])
def test_in_chunks_of_any_size(each: int) -> None:
    either_way(trains, functools.partial(made, "Adam"), state=chunks(12, each, kept=()))


def test_complex_parameters() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(SIDE, SIDE, dtype=torch.complex64) / SIDE for _ in range(3))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                rows = rows @ weight
            return rows.abs().mean()

    either_way(lambda training: trains(training), functools.partial(made, "Adam"), Complex, chunks(3, 1))
