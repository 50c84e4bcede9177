"""Networks of which autograd saves larger copies of tensors that nothing else saves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.runtime.nets import Case

WIDTH = 32
Made = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]


class RootMeanSquare(nn.Module):
    """As in Llama: autograd saves the float32 copy of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(hidden.dtype)


class LlamaBlock(nn.Module):
    """Two norms, each before a layer whose result is added: every residual dies in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RootMeanSquare() for _ in range(2))
        self.mixing, self.widening = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.narrowing = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.mixing(self.norms[0](hidden))
        return hidden + self.narrowing(nn.functional.silu(self.widening(self.norms[1](hidden))))


class Shared(nn.Module):
    """Keys for two heads of queries each, repeated as a tensor of their own, as in grouped attention."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        queries = self.queries(hidden).view(*hidden.shape[:-1], 2, WIDTH)
        keys = self.keys(hidden).tanh().mul(0.5).unsqueeze(-2).expand(queries.shape).clone()
        return (queries * keys).sum(-2)


class NormedProjection(nn.Module):
    """Under autocast a norm saves a float32 copy of the 16 bits that the linear layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(WIDTH, WIDTH), RootMeanSquare()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.norm(self.project(hidden)).tanh()


def _plain(where: torch.device) -> Made:
    layers = nn.Linear(WIDTH, WIDTH), *(LlamaBlock() for _ in range(3)), Shared(), RootMeanSquare()
    batch = torch.randn(96, WIDTH).bfloat16().to(where)
    return nn.Sequential(*layers).bfloat16().to(where), lambda model: model(batch).float().square().mean()


def _autocast(where: torch.device) -> Made:
    batch = torch.randn(96, WIDTH).to(where)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(NormedProjection() for _ in range(4)), Shared())

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast(where.type, torch.bfloat16):
            return model(batch).float().square().mean()

    return model.to(where), loss


def casts_on(where: torch.device) -> dict[str, Case]:
    """The cases on a device."""
    return {"bfloat16": Case(lambda: _plain(where)), "autocast": Case(lambda: _autocast(where))}


CASTS = casts_on(torch.device("cpu"))
