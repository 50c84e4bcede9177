"""Shared by all workloads: importing libraries of the extra, seeds and optimizers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch

from poochplan.errors import UsageError

_START_TOKEN = 0  # what a decoder reads first; the data use tokens from 1 on


def require(module: str, extra: str = "workloads") -> ModuleType:
    """The imported ``module`` of an extra. Raises ``UsageError`` if the library is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise UsageError(
            f"this workload needs {library}, which is not installed; run: pip install 'poochplan[{extra}]'"
        ) from error


def seeded(seed: int) -> torch.Generator:
    """Seeds torch's global generator (weights, dropout), and returns another generator for the data."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def reversal(
    model: torch.nn.Module,
    batch_size: int,
    sequence_length: int,
    vocabulary: int,
    where: torch.device,
    data: torch.Generator,
) -> Callable[[], torch.Tensor]:
    """The step in which ``model`` learns to write a random sequence backwards: of the source and the shifted target,
    each ``[batch, length]`` of tokens, it gives logits.
    """
    source = torch.randint(_START_TOKEN + 1, vocabulary, (batch_size, sequence_length), generator=data)
    target = source.flip(1)
    previous = torch.nn.functional.pad(target[:, :-1], (1, 0), value=_START_TOKEN)
    source, previous, target = (tokens.to(where) for tokens in (source, previous, target))

    def step() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(source, previous).flatten(0, 1), target.flatten())

    return step


def make_optimizer(name: str, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """``"adamw"``, or ``"sgd"`` with a momentum of 0.9, for all parameters. Raises ``UsageError`` for other names."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    raise UsageError(f"optimizer: expected one of adamw, sgd, found {name!r}")
