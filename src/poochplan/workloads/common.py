"""What every workload needs: the extra's libraries, a seed and an optimizer."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from poochplan.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
}


def require(module: str) -> ModuleType:
    """The imported ``module`` of the ``workloads`` extra.

    Raises
    ------
    UsageError
        The library is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise UsageError(
            f"this workload needs {library}, which is not installed; run: pip install 'poochplan[workloads]'"
        ) from error


def seeded(seed: int) -> torch.Generator:
    """Seeds torch's global generator (weights, dropout) and returns a generator of its own for the data."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def make_optimizer(name: str, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """``"adamw"``, or ``"sgd"`` with a momentum of 0.9, over all parameters of ``model``.

    Raises
    ------
    UsageError
        Another name.
    """
    if name not in _OPTIMIZERS:
        raise UsageError(f"optimizer: expected one of {', '.join(sorted(_OPTIMIZERS))}, found {name!r}")
    return _OPTIMIZERS[name](model.parameters(), lr)
